"""The paper's invariances, on the diagonal optimizers themselves (float64).

Scale. Let ḡ be the gradient of a loss that averages B terms, g = B ḡ that of the sum. With
s̄ <- (1-β₂γ) s̄ + β₂ B ḡ² and s <- (1-β₂γ) s + β₂ g², s = B s̄ for ever if s₀ = B s̄₀; with λ = B λ̄ the
direction g/(s+λ) = ḡ/(s̄+λ̄) is the same, and so is the trajectory at the same step size.

Affine. For p = a q, a diagonal: g_q = a g_p, so s_q = a² s_p for ever if it is so at the start;
then g_q/s_q = (g_p/s_p)/a and p = a q for ever (without damping, which is not transformed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rootfree

TERMS, FEATURES, STEPS = 12, 5, 30  # twelve: a power of two would scale without any rounding
DAMPING = 0.2  # as large as the curvature here, so that it is felt

# 30 steps of ~20 roundings, 1.1e-16 each, is 7e-14; a disturbance of the start grows at most
# twofold on the way (measured).
EQUAL = 1e-12
DIFFERENT = 1e-3

# With a fast start, s₀ would soon be forgotten and could not be missed.
PLAIN = {"fast_start": False}
OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "RFRMSprop": (rootfree.RFRMSprop, {"lr": 0.05, "precond_lr": 0.1, "momentum": 0.5, **PLAIN}),
    "RFAdagrad": (rootfree.RFAdagrad, {"lr": 0.5, "precond_lr": 0.1, "momentum": 0.5}),
    "RFAdamW": (rootfree.RFAdamW, {"lr": 0.05, "betas": (0.5, 0.9), **PLAIN}),
}


@pytest.fixture(params=OPTIMIZERS)
def make(request) -> Callable[..., Any]:
    optimizer, options = OPTIMIZERS[request.param]
    plain = {"weight_decay": 0.02, "max_update": None}
    return lambda ps, **given: optimizer(ps, **{**plain, **options, **given})


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape))


X, Y = tensor(0, TERMS, FEATURES), tensor(1, TERMS)
START = tensor(2, FEATURES)


def term_losses(p: Tensor) -> Tensor:
    """One loss per example, smooth and not quadratic."""
    return nn.functional.softplus((X @ p - Y) ** 2)


def average(p: Tensor) -> Tensor:
    return term_losses(p).mean()


def total(p: Tensor) -> Tensor:
    return term_losses(p).sum()


def trajectory(
    make: Callable[..., Any],
    loss: Callable[[Tensor], Tensor],
    *,
    start: Tensor = START,
    preconditioner: float | Tensor = 1.0,
    **options: Any,
) -> Tensor:
    """The parameter after each step; `preconditioner` is s₀."""
    p = nn.Parameter(start.clone())
    optimizer = make([p], **options)
    optimizer.state[p]["preconditioner"].copy_(torch.as_tensor(preconditioner))
    points = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(p).backward()
        optimizer.step()
        points.append(p.detach().clone())
    return torch.stack(points)


def apart(a: Tensor, b: Tensor) -> float:
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    return ((a - b).norm() / b.norm()).item()


def test_summed_and_averaged_losses_give_one_trajectory(make):
    averaged = trajectory(make, average, batch_size=TERMS, damping=DAMPING)
    summed = trajectory(
        make, total, batch_size=1, damping=DAMPING * TERMS, preconditioner=float(TERMS)
    )
    assert apart(averaged[-1], START) > 0.1  # it went somewhere
    assert apart(summed, averaged) < EQUAL


def test_scale_invariance_needs_the_batch_size_the_start_and_the_damping(make):
    averaged = trajectory(make, average, batch_size=TERMS, damping=DAMPING)
    without_batch_size = trajectory(make, average, batch_size=1, damping=DAMPING)
    assert apart(without_batch_size, averaged) > DIFFERENT
    scaled = {"batch_size": 1, "damping": DAMPING * TERMS, "preconditioner": float(TERMS)}
    for left_out in ({"preconditioner": 1.0}, {"damping": DAMPING}):
        summed = trajectory(make, total, **{**scaled, **left_out})
        assert apart(summed, averaged) > DIFFERENT


def test_any_factor_on_the_loss_cancels_when_the_batch_size_carries_it(make):
    """c times the loss with B/c terms: (B/c)(c g)² = c·B g², as a curvature has to scale."""
    averaged = trajectory(make, average, batch_size=TERMS, damping=0.0)
    scaled = trajectory(
        make, lambda p: 3 * average(p), batch_size=TERMS // 3, damping=0.0, preconditioner=3.0
    )
    assert apart(scaled, averaged) < EQUAL


def reparametrised(make: Callable[..., Any], a: Tensor, preconditioner: Tensor) -> Tensor:
    """Optimise q with p = A q; returns the trajectory in p."""
    q = trajectory(
        make,
        lambda q: average(a @ q),
        start=torch.linalg.solve(a, START),
        preconditioner=preconditioner,
        batch_size=TERMS,
        damping=0.0,
    )
    return q @ a.T


def test_diagonal_reparametrisation_changes_nothing(make):
    plain = trajectory(make, average, batch_size=TERMS, damping=0.0)
    a = tensor(3, FEATURES).exp()
    assert apart(reparametrised(make, a.diag(), a**2), plain) < EQUAL
    # The start has to be transformed alike.
    assert apart(reparametrised(make, a.diag(), torch.ones_like(a)), plain) > DIFFERENT


def test_a_full_reparametrisation_breaks_it(make):
    plain = trajectory(make, average, batch_size=TERMS, damping=0.0)
    a = tensor(4, FEATURES, FEATURES) / 2 + 2 * torch.eye(FEATURES, dtype=torch.float64)
    # diag(AᵀA) is the best a diagonal preconditioner can do for s₀ = 1.
    assert apart(reparametrised(make, a, (a.T @ a).diag()), plain) > DIFFERENT


def one_step(optimizer: Callable[..., torch.optim.Optimizer], start: float, scale: float) -> float:
    """One step on ½(scale·p)² from `start`."""
    p = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    stepper = optimizer([p])
    (0.5 * (scale * p) ** 2).backward()
    stepper.step()
    return p.item()


@pytest.mark.parametrize("method", ["RFRMSprop", "RFAdagrad", "RFAdamW"])
def test_worked_example_without_the_root(method):
    """The paper's appendix: ½a² from a₀ = 2 and, in b = a/2, from b₀ = 1; s = g², step size one."""

    def optimizer(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
        common: dict[str, Any] = {"lr": 1.0, "batch_size": 1, "damping": 0.0, "max_update": None}
        if method == "RFAdamW":
            return rootfree.RFAdamW(ps, betas=(0.0, 0.0), **common)
        made = getattr(rootfree, method)(ps, precond_lr=1.0, momentum=0.0, **common)
        if method == "RFAdagrad":  # which sums, so s = g² takes a start at zero
            made.state[ps[0]]["preconditioner"].zero_()
        return made

    a, b = one_step(optimizer, 2.0, scale=1.0), one_step(optimizer, 1.0, scale=2.0)
    assert (a, b) == (1.5, 0.75)
    assert a == 2 * b


def test_worked_example_with_the_root_breaks():
    def optimizer(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(ps, lr=1.0, alpha=0.0, eps=0.0)  # g/√g²

    a, b = one_step(optimizer, 2.0, scale=1.0), one_step(optimizer, 1.0, scale=2.0)
    assert (a, b) == (1.0, 0.0)
    assert a != 2 * b
