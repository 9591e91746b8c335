"""Invariance to the scale of the loss and to affine reparametrisation, along whole trajectories.

Scale. ḡ is the gradient of a loss that averages B terms, g = B·ḡ that of their sum. With B in the
curvature, S̄ <- (1-β₂γ)S̄ + β₂(B·ḡḡᵀ + λ̄I) and S <- (1-β₂γ)S + β₂(ggᵀ + λI) keep S = B·S̄ if it is so
at the start and λ = B·λ̄. Then S⁻¹g = S̄⁻¹ḡ: with the same step sizes β₁ and β₂, the same trajectory.

Affine. For p = A q the gradient is Aᵀg, so S_q = AᵀSA for ever if it is so at the start, and
A·S_q⁻¹Aᵀg = S⁻¹g. Damping, which is not transformed, has to be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from rootfree_lab.verify.claim import Measured, above, below, claim, largest
from rootfree_lab.verify.draws import mixing, normal, rotation
from rootfree_lab.verify.methods import (
    DIAGONAL,
    IF_SHAMPOO,
    MATRIX,
    MATRIX_METHODS,
    RF_RMSPROP,
    RF_SHAMPOO,
    Method,
    Shape,
    multiply_axes,
    walk,
)

TERMS = 20  # no power of two: scaling by it rounds
STEPS = 12

# 12 steps of some 30 roundings, 1e-16 each, times conditioning (16 for S); nothing amplifies them,
# the loss being convex. Of 40 seeds the worst gave 6e-15. A constant off by 1 % shows at 1e-3.
EQUAL = 1e-12
DIFFERENT = 1e-2

METHODS = (*DIAGONAL, *MATRIX_METHODS)

STEP: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.02, "precond_lr": 0.05}


@dataclass(frozen=True)
class Regression:
    """Logistic regression with three outputs: 12 weights, `TERMS` terms, full-rank curvature."""

    X: Tensor
    signs: Tensor

    @classmethod
    def draw(cls, generator: torch.Generator) -> Regression:
        X, signs = normal(generator, TERMS, 4), normal(generator, TERMS, 3).sign()
        return cls(X, signs)

    def terms(self, w: Tensor) -> Tensor:
        """One loss per example."""
        return nn.functional.softplus(-self.signs * (self.X @ w.reshape(3, 4).mT)).sum(1)

    def average(self, w: Tensor) -> Tensor:
        return self.terms(w).mean()

    def total(self, w: Tensor) -> Tensor:
        return self.terms(w).sum()


def run(
    method: Method,
    loss: Callable[[Tensor], Tensor],
    start: Tensor,
    As: Sequence[Tensor],
    **options: Any,
) -> Tensor:
    """The parameter after every step, with S₀ = ⊗ AₙᵀAₙ (no As: as the method itself starts)."""
    p = nn.Parameter(start.clone())
    optimizer = method.make(p, As, **{**STEP, **options})
    points = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(p).backward()
        optimizer.step()
        points.append(p.detach().clone())
    return torch.stack(points)


def apart(x: Tensor, y: Tensor, start: Tensor) -> float:
    """The largest distance of two trajectories, relative to how far the second one went."""
    return float((x - y).flatten(1).norm(dim=1).max() / (y[-1] - start).norm())


def identities(axes: Shape, factor: float = 1.0) -> list[Tensor]:
    """The start S₀ = factor·I."""
    root = factor ** (1 / (2 * len(axes)))
    return [root * torch.eye(d, dtype=torch.float64) for d in axes]


def _variants(method: Method) -> list[dict[str, Any]]:
    """Option sets under which a method has to be invariant."""
    if method in DIAGONAL:
        return [{}]
    variants: list[dict[str, Any]] = [{"gamma": 0.0}, {"gamma": 1.0}]
    if method is IF_SHAMPOO:
        with_momentum = {"gamma": 1.0, "riemannian_momentum": 0.5}
        variants += [with_momentum, {"gamma": 1.0, "factor_norm": "spectral"}]
    return variants


def scale(generator: torch.Generator, *, method: Method) -> Measured:
    """Averaged loss with B against summed loss with B = 1, λ and S₀ scaled alike."""
    problem = Regression.draw(generator)
    differences = []
    for shape in method.shapes:
        start, axes = normal(generator, *shape), method.axes(shape)
        # Without damping some methods take another path through the code.
        for variant, lam in product(_variants(method), (0.0, 0.1)):
            options = {**variant, "batch_size": TERMS, "damping": lam}
            averaged = run(method, problem.average, start, identities(axes), **options)
            options |= {"batch_size": 1, "damping": TERMS * lam}
            initial = identities(axes, TERMS)
            if method is IF_SHAMPOO:  # it has an option for the scale of S₀
                initial, options["init_scale"] = [], TERMS ** (-1 / (2 * len(axes)))
            summed = run(method, problem.total, start, initial, **options)
            differences.append(apart(summed, averaged, start))
    return below(largest(differences), EQUAL, f"B = {TERMS} averaged against summed, {STEPS} steps")


for _method in METHODS:
    _sentence = f"{_method.name}: averaged and summed losses give one trajectory."
    claim(f"scale-{_method.short}", _sentence, method=_method)(scale)


@claim(
    "scale-from-gradient",
    "IF-Shampoo started from the gradient's size: the same, with nothing to set.",
)
def scale_from_the_gradient(generator: torch.Generator) -> Measured:
    """With init_scale="gradient" the start scales by itself."""
    problem = Regression.draw(generator)
    differences = []
    for shape in IF_SHAMPOO.shapes:
        start = normal(generator, *shape)
        averaged, summed = (
            run(
                IF_SHAMPOO, loss, start, [],
                batch_size=B, damping=0.1 * TERMS / B, init_scale="gradient",
            )
            for loss, B in ((problem.average, TERMS), (problem.total, 1))
        )  # fmt: skip
        differences.append(apart(summed, averaged, start))
    return below(largest(differences), EQUAL, "nothing but B and λ differs")


@claim(
    "scale-needs-batch-size",
    "With B left out the trajectory is another, for every one of these methods.",
)
def needs_batch_size(generator: torch.Generator) -> Measured:
    """The averaged loss with B left out (B = 1) is another trajectory, for every method."""
    problem = Regression.draw(generator)
    distances = {}
    for method in METHODS:
        shape = method.shapes[-1]
        start, ones = normal(generator, *shape), identities(method.axes(shape))
        right, wrong = (
            run(method, problem.average, start, ones, batch_size=B, damping=0.1) for B in (TERMS, 1)
        )
        distances[method.name] = apart(wrong, right, start)
    nearest = min(distances, key=lambda name: distances[name])
    return above(distances[nearest], DIFFERENT, f"least for {nearest}; B = 1 for {TERMS}")


def affine(generator: torch.Generator, *, method: Method) -> Measured:
    """Any Aₙ (diagonal ones for the diagonal method), S₀ transformed alike."""
    problem = Regression.draw(generator)
    differences = []
    for shape in method.shapes:
        start, axes = normal(generator, *shape), method.axes(shape)
        As = [mixing(generator, d, d) for d in axes]
        if method in DIAGONAL:
            As = [A.diagonal().exp().diag() for A in As]
        for variant in _variants(method):
            options = {"batch_size": TERMS, "damping": 0.0, **variant}
            plain = run(method, problem.average, start, identities(axes), **options)
            moved = _reparametrised(method, problem, start, As, As, options)
            differences.append(apart(moved, plain, start))
    kind = "diagonal" if method in DIAGONAL else "⊗ Aₙ" if method.kronecker else "any A"
    return below(largest(differences), EQUAL, f"p = A q, {kind}, {STEPS} steps")


for _method in METHODS:
    _which = "a diagonal A" if _method in DIAGONAL else "any A"
    _which = "a Kronecker product E ⊗ F" if _method.kronecker else _which
    _sentence = f"{_method.name}: the trajectory in p = A q is that in p, for {_which}."
    claim(f"affine-{_method.short}", _sentence, method=_method)(affine)


def _reparametrised(
    method: Method,
    problem: Regression,
    start: Tensor,
    As: Sequence[Tensor],
    initial: Sequence[Tensor],
    options: dict[str, Any],
) -> Tensor:
    """The trajectory in p of a method that works on q, p = (⊗ Aₙ) q."""
    q0 = multiply_axes([torch.linalg.inv(A) for A in As], start)

    def loss(q: Tensor) -> Tensor:
        return problem.average(multiply_axes(As, q))

    points = run(method, loss, q0, initial, **options)
    return torch.stack([multiply_axes(As, q) for q in points])


@claim(
    "affine-limits", "Diagonal and Kronecker preconditioners are not invariant to more than that."
)
def affine_limits(generator: torch.Generator) -> Measured:
    """A rotation of all elements is too much for diagonal and Kronecker preconditioners.

    It leaves S₀ = I as it is, so that the start cannot be what makes the difference.
    """
    problem, start = Regression.draw(generator), normal(generator, *MATRIX)
    Q = [rotation(generator, 12, 12)]
    distances = {}
    for method in (RF_RMSPROP, RF_SHAMPOO, IF_SHAMPOO):
        shape = method.shapes[0] if method is RF_RMSPROP else MATRIX
        first, ones = start.view(shape), identities(method.axes(shape))
        options = {"batch_size": TERMS, "damping": 0.0}
        plain = run(method, problem.average, first, ones, **options)
        turned = _reparametrised(method, problem, first, Q, ones, options)
        distances[method.name] = apart(turned, plain, first)
    nearest = min(distances, key=lambda name: distances[name])
    return above(distances[nearest], DIFFERENT, f"least for {nearest}; a rotation of all elements")


@claim(
    "affine-root-breaks",
    "The worked example: a = 2b after a step without the root, and not with it.",
)
def worked_example(generator: torch.Generator) -> Measured:
    """½a² from a₀ = 2, and in b = a/2 from b₀ = 1: one step of size one with s = g²."""
    options: dict[str, Any] = {"precond_lr": 1.0, "momentum": 0.0, "damping": 0.0}
    without_root = partial(RF_RMSPROP.build, lr=1.0, batch_size=1, **options)
    with_root = partial(torch.optim.RMSprop, lr=1.0, alpha=0.0, eps=0.0)
    a, b = _one_step(without_root, 2.0, 1.0), _one_step(without_root, 1.0, 2.0)
    a_root, b_root = _one_step(with_root, 2.0, 1.0), _one_step(with_root, 1.0, 2.0)
    figure = abs(a - 2 * b)
    return Measured(
        figure,
        "0, root: 1",
        passed=(a, b) == (1.5, 0.75) and (a_root, b_root) == (1.0, 0.0),
        detail=f"|a - 2b|: a = {a:g}, b = {b:g}; with the root a = {a_root:g}, b = {b_root:g}",
    )


def _one_step(build: Callable[..., torch.optim.Optimizer], start: float, scale: float) -> float:
    """One step on ½(scale·p)² from `start`."""
    p = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    walk(build([p]), p, [scale**2 * p.detach()])
    return p.item()
