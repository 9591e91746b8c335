"""Inverse-free whitening keeps the root, and what is true of it; and the balance of the factors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rootfree
from rootfree_lab.baselines.roots import inverse_root
from rootfree_lab.verify.claim import Measured, above, below, claim, largest, relative_difference
from rootfree_lab.verify.draws import mixing, normal, rotation
from rootfree_lab.verify.first_order import slope_two
from rootfree_lab.verify.methods import Constant, walk

SHAPE = (3, 4)
STEPS = 20
EQUAL = 1e-12
CONVERGED = 1e-6
RATIO = 4.0

_PLAIN: dict[str, Any] = {"update_every": 1, "structure": "dense", "weight_decay": 0.0}


@claim("whitening-scale", "IF-Whitening: the trajectory does not depend on the scale of the loss.")
def scale(generator: torch.Generator) -> Measured:
    """Trajectories of a loss and of multiples of it."""
    grads = [normal(generator, *SHAPE) for _ in range(STEPS)]
    p = _trained(grads)[0]
    factors = (1e-6, 1e6)
    moved = [_trained([c * g for g in grads])[0] for c in factors]
    return below(largest(relative_difference(q, p) for q in moved), EQUAL, f"loss times {factors}")


@claim(
    "whitening-orthogonal",
    "IF-Whitening: the trajectory in Q p Rᵀ is that in p, for orthogonal Q and R.",
)
def orthogonal(generator: torch.Generator) -> Measured:
    """Trajectories in p and in Q p Rᵀ."""
    grads = [normal(generator, *SHAPE) for _ in range(STEPS)]
    Q, R = (rotation(generator, d, d) for d in SHAPE)
    p, q = _trained(grads)[0], _trained([Q @ g @ R.mT for g in grads])[0]
    return below(relative_difference(q, Q @ p @ R.mT), EQUAL, f"{STEPS} steps, with damping")


@claim("whitening-fixed-point", "IF-Whitening: P H P = I where it has come to rest.")
def fixed_point(generator: torch.Generator) -> Measured:
    """P H P against I where H stays the same."""
    L, R = (mixing(generator, d, d) for d in SHAPE)
    H = torch.kron(L @ L.mT, R @ R.mT)
    grads = [normal(generator, *SHAPE) for _ in range(300)]
    _, Ps = _trained(grads, damping=0.0, precond_lr=0.3, curvature=Constant(H, SHAPE))
    P = torch.kron(*Ps)
    eye = torch.eye(len(H), dtype=H.dtype)
    return below(relative_difference(P @ H @ P, eye), CONVERGED, "300 steps, β₂ = 0.3")


@claim(
    "whitening-first-order",
    "IF-Whitening is Shampoo with the root, by eigendecomposition, to first order in β₂.",
)
def first_order(generator: torch.Generator) -> Measured:
    """Five steps against Shampoo by eigendecomposition, with a weight of 2β₂."""
    grads, rho = [normal(generator, *SHAPE) for _ in range(5)], 0.1

    def difference(beta2: float) -> float:
        _, Ps = _trained(grads, damping=rho, precond_lr=beta2, factor_norm=None)
        v = grads[0].square().mean()
        Ss = [v.sqrt() * torch.eye(d, dtype=v.dtype) for d in SHAPE]
        for i, g in enumerate(grads):
            v = v + beta2 / 100 * (g.square().mean() - v) if i else v
            Ss = _shampoo(Ss, g, weight=2 * beta2, lam=float(rho * v))
        roots = [inverse_root(S, 2, damping=0.0, dtype=S.dtype) for S in Ss]
        return relative_difference(torch.kron(*Ps), torch.kron(*roots))

    return slope_two([difference])


@claim(
    "whitening-positive-definite",
    "IF-Whitening: P is positive definite for any gradients and any β₂ up to 1.",
)
def positive_definite(generator: torch.Generator) -> Measured:
    """Eigenvalues of P in fp32 after low-rank gradients whose size jumps by 20 orders."""
    ratios = []
    for beta2 in (0.1, 0.5, 1.0):
        sizes = 10.0 ** (10 * torch.rand(40, generator=generator) * (-1) ** torch.arange(40))
        grads = [(c * normal(generator, 6, 1) @ normal(generator, 1, 5)).float() for c in sizes]
        p, Ps = _trained(grads, precond_lr=beta2)
        values = [torch.linalg.eigvalsh(P.double()) for P in Ps]
        ratios += [float(v.min() / v.max()) if p.isfinite().all() else -1.0 for v in values]
    return above(min(ratios), 0.0, "rank one, sizes from 1e-10 to 1e10, β₂ up to 1")


@claim(
    "balance",
    "Factors whose scales are far apart come back to one scale, and no bit of a step changes.",
)
def balance(generator: torch.Generator) -> Measured:
    """Factors that start far apart: the trajectory is the same, bit for bit, and they come back."""
    grads = [normal(generator, *SHAPE) for _ in range(STEPS)]
    worst = 0.0
    methods: Sequence[tuple[Any, dict[str, int]]] = (
        (rootfree.IFShampoo, {"batch_size": 7}),
        (rootfree.RFShampoo, {"batch_size": 7}),
        (rootfree.IFWhitening, {}),
    )
    for method, options in methods:
        trajectories, sizes = [], []
        for power in (1.0, 2.0**20):
            p = nn.Parameter(torch.zeros(*SHAPE, dtype=torch.float64))
            optimizer = method([p], update_every=1, **options)
            state = optimizer.state[p]
            factors = {"block0.factor0": power, "block0.factor1": 1 / power}
            factors |= {"block0.inverse0": 1 / power, "block0.inverse1": power}
            for key in factors.keys() & state.keys():
                state[key] *= factors[key]
            walk(optimizer, p, grads)
            trajectories.append(p.detach())
            roots = [state[f"block0.factor{n}"].square().mean().sqrt() for n in (0, 1)]
            sizes.append(float(max(roots) / min(roots)))
        same = torch.equal(*trajectories)
        # Those of RF-Shampoo are squares of the others'.
        ratio = sizes[1] ** 0.5 if method is rootfree.RFShampoo else sizes[1]
        worst = max(worst, ratio if same else torch.inf)
    return below(worst, RATIO, f"ratio after {STEPS} steps, 2^40 before; trajectories identical")


def _trained(grads: Sequence[Tensor], **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The parameter, from zero, and P of both axes after a step with each of the gradients."""
    p = nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = rootfree.IFWhitening([p], **{**_PLAIN, "damping": 0.01, **options})
    state = walk(optimizer, p, grads)
    Cs = [state[f"block0.factor{n}"][0] for n in (0, 1)]
    return p.detach(), [C @ C.mT for C in Cs]


def _shampoo(Ss: Iterable[Tensor], G: Tensor, *, weight: float, lam: float) -> list[Tensor]:
    """One refresh of both factors of Shampoo by the Kullback-Leibler divergence."""
    S, T = Ss
    (p, d), left, right = G.shape, torch.linalg.inv(S), torch.linalg.inv(T)
    first = (G @ right @ G.mT + lam * right.trace() * torch.eye(p, dtype=G.dtype)) / d
    second = (G.mT @ left @ G + lam * left.trace() * torch.eye(d, dtype=G.dtype)) / p
    return [(1 - weight) * S + weight * first, (1 - weight) * T + weight * second]
