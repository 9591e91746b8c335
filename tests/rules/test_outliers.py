"""One gradient far beyond all others: nothing leaves the range, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import rootfree

B = {"batch_size": 16}
METHODS: dict[str, Callable[..., Any]] = {
    "RFRMSprop": lambda ps: rootfree.RFRMSprop(ps, **B),
    "RFRMSprop-no-limit": lambda ps: rootfree.RFRMSprop(ps, max_update=None, **B),
    "RFRMSprop-bf16": lambda ps: rootfree.RFRMSprop(ps, state_dtype=torch.bfloat16, **B),
    "RFAdagrad": lambda ps: rootfree.RFAdagrad(ps, **B),
    "RFAdamW": lambda ps: rootfree.RFAdamW(ps, **B),
    "RFFullAdagrad": lambda ps: rootfree.RFFullAdagrad(ps, **B),
    "IFFullAdagrad": lambda ps: rootfree.IFFullAdagrad(ps, **B),
    "IFFullAdagrad-covariance": lambda ps: rootfree.IFFullAdagrad(ps, form="covariance", **B),
    "RFShampoo": lambda ps: rootfree.RFShampoo(ps, **B),
    "IFShampoo": lambda ps: rootfree.IFShampoo(ps, **B),
    "IFWhitening": lambda ps: rootfree.IFWhitening(ps),
}


def train(
    make,
    factor: float,
    *,
    at: int = 5,
    steps: int = 12,
    always: bool = False,
    dtype: torch.dtype = torch.float32,
):
    """Least squares; the gradients of one step, or of all, are multiplied by a factor.

    Returns the optimizer, the distance to the solution and the largest move of a parameter.
    """
    model = nn.Linear(4, 3, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = make(model.parameters())
    draw = torch.Generator().manual_seed(0)
    solution = torch.randn(4, 3, generator=draw, dtype=dtype)
    largest = 0.0
    for step in range(steps):
        x = torch.randn(16, 4, generator=draw, dtype=dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x @ solution).backward()
        if step == at or always:
            for p in model.parameters():
                p.grad.mul_(factor)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        pairs = zip(model.parameters(), before, strict=True)
        largest = max(largest, *[(p - q).abs().max().item() for p, q in pairs])
    return optimizer, (model.weight.T - solution).norm().item(), largest


def finite(optimizer) -> bool:
    rows = optimizer.state.values()
    tensors = [*optimizer.state, *(t for row in rows for t in row.values())]
    return all(bool(t.isfinite().all()) for t in tensors)


@cache
def usual_move(method: str) -> float:
    """The largest move of a parameter without an outlier."""
    return train(METHODS[method], 1.0)[2]


@pytest.mark.parametrize("factor", [1e6, 1e25, 1e36], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_an_outlier_stays_in_range_and_moves_nothing_far(method, factor):
    usual = usual_move(method)
    for always in (False, True):
        optimizer, _, largest = train(METHODS[method], factor, always=always)
        assert finite(optimizer)
        assert largest <= 3 * usual


BARE = {"lr": 0.1, "precond_lr": 0.1, "momentum": 0.0, "nesterov": False, "safeguard": False}
COVARIANCE = {"form": "covariance"}
PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "RFFullAdagrad": (rootfree.RFFullAdagrad, {}),
    "RFFullRMSprop": (rootfree.RFFullAdagrad, {"gamma": 1.0}),
    "RFFullRMSprop-damped": (rootfree.RFFullAdagrad, {"gamma": 1.0, "damping": 0.01}),
    "IFFullAdagrad": (rootfree.IFFullAdagrad, {}),
    "IFFullAdagrad-covariance": (rootfree.IFFullAdagrad, COVARIANCE),
    "IFFullRMSprop-damped": (
        rootfree.IFFullAdagrad,
        {**COVARIANCE, "gamma": 1.0, "damping": 0.01},
    ),
}


@pytest.mark.parametrize("factor", [1e6, 1e25, 1e36], ids=str)
@pytest.mark.parametrize("method", PLAIN)
def test_the_papers_full_matrix_rules_stay_finite(method, factor):
    """Exact inverses move no farther than usual; inverse-free ones do so with `max_update`."""
    make, options = PLAIN[method]
    exact = make is rootfree.RFFullAdagrad

    def plain(ps, **limits):
        return make(ps, **B, **BARE, **options, **limits)

    def limited(ps):
        return plain(ps, max_update=1.0)

    for always in (False, True):
        optimizer, _, _ = train(plain, factor, always=always)
        assert finite(optimizer)
    usual = train(plain, 1.0)[2]
    _, _, largest = train(plain if exact else limited, factor)
    assert largest <= (3 * usual if exact else 1.01 * BARE["lr"])


SUM, AVERAGE = {"gamma": 0.0, **B}, {"gamma": 1.0, **B}
#: Those that sum beside those that average.
BOTH: dict[str, Callable[..., Any]] = {
    "RFFullRMSprop": lambda ps: rootfree.RFFullAdagrad(ps, **AVERAGE),
    "IFFullRMSprop": lambda ps: rootfree.IFFullAdagrad(ps, **AVERAGE),
    "RFShampoo-sum": lambda ps: rootfree.RFShampoo(ps, **SUM),
    "IFShampoo-sum": lambda ps: rootfree.IFShampoo(ps, **SUM),
}
#: steps after which half of the usual way is done in spite of an outlier, where 60 do not suffice
SLOW = {"RFRMSprop": 600, "RFAdamW": 600, "RFFullAdagrad": 400, "RFFullRMSprop": 200}


@pytest.mark.parametrize(
    "method", sorted({*METHODS, *BOTH} - {"RFRMSprop-no-limit", "RFRMSprop-bf16"})
)
def test_training_goes_on_after_an_outlier(method):
    """A sum that keeps a square of 10¹² would stop."""
    make, steps = (METHODS | BOTH)[method], SLOW.get(method, 60)
    _, there, _ = train(make, 1e6, at=5, steps=6)
    _, found, _ = train(make, 1e6, steps=steps)
    _, usual, _ = train(make, 1.0, steps=steps)
    assert usual < there
    assert there - found > 0.5 * (there - usual), (there, found, usual)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_first_gradients_at_the_end_of_the_range(method):
    """Their norm, times the root of B, is beyond it."""
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = METHODS[method]([p])
    for size in (1e38, 1e38, 1.0, 1.0):
        p.grad = size * torch.tensor([1.0, -0.5, 0.7]).expand(4, 3)
        optimizer.step()
    assert optimizer.skipped_steps == 0
    assert finite(optimizer)


def products(ps, make=rootfree.IFShampoo, **options):
    """With the kernels' products, where there are kernels."""
    B = {} if make is rootfree.IFWhitening else {"batch_size": 16}
    return make(ps, fused=True, matmul_dtype=torch.bfloat16, **B, **options)


KERNELS: dict[str, Callable[..., Any]] = {
    "IFShampoo-kernels": products,
    "IFWhitening-kernels": lambda ps: products(ps, rootfree.IFWhitening),
    "RFShampoo-kernels": lambda ps: rootfree.RFShampoo(ps, fused=True, **B),
}


@pytest.mark.parametrize("method", sorted({*METHODS, *KERNELS}))
@pytest.mark.parametrize("usual", [1e-2, 1e-6], ids=str)
def test_an_outlier_at_the_end_of_the_range(method, usual):
    """∞ - ∞ in a product with factors would be no number, for good."""
    device = "cpu"
    if method in KERNELS:
        pytest.importorskip("triton")
        device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.ones(16, 8, device=device))
    optimizer = (METHODS | KERNELS)[method]([p])
    for step in range(16):
        p.grad = torch.randn(16, 8, generator=draw).to(device) * usual
        if step in (10, 11):
            p.grad = 3e38 * p.grad.sign()
        if step in (12, 13):
            p.grad[0, 0] = 3e38
        optimizer.step()
    assert optimizer.skipped_steps == 0
    assert finite(optimizer)


@pytest.mark.parametrize("method", ["IFShampoo", "IFWhitening"])
def test_a_normalised_step_has_no_trace_of_an_outlier(method):
    """Damping relative to a mean that had the outlier in it held whitening back for good."""
    make = METHODS[method]
    for factor in (1e6, 1e25):
        _, there, _ = train(make, factor, at=20, steps=21)
        _, found, _ = train(make, factor, at=20, steps=300)
        _, usual, _ = train(make, 1.0, steps=300)
        assert there - found > 0.9 * (there - usual), (there, found, usual)


class SquaredGradients:
    """B·g², given as a curvature."""

    def joint(self):
        return ()

    def check(self, params):
        pass

    def used(self):
        pass

    def of(self, p, *, batch_size):
        return rootfree.DiagonalCurvature(batch_size * p.grad.square())


@pytest.mark.parametrize("method", [rootfree.RFRMSprop, rootfree.RFAdagrad, rootfree.RFAdamW])
def test_a_given_curvature_is_limited_together_with_the_gradient(method):
    """Squares of a gradient are the curvature, whoever says so."""
    for factor in (1e6, 1e15):
        own, _, _ = train(lambda ps: method(ps, **B), factor)
        given, _, _ = train(lambda ps: method(ps, curvature=SquaredGradients(), **B), factor)
        for mine, expected in zip(given.state, own.state, strict=True):
            torch.testing.assert_close(mine, expected)
            torch.testing.assert_close(given.state[mine], own.state[expected])


class LargeOnce(SquaredGradients):
    """I ⊗ I, and once 3·10³⁸ as large: the next power of two is infinite."""

    def __init__(self):
        self.sizes = [1.0, 1.0, 3e38, 1.0]

    def of(self, p, *, batch_size):
        U, V = torch.eye(8) * self.sizes.pop(0), torch.eye(6)
        return rootfree.KroneckerCurvature((U, V), (8, 6))


@pytest.mark.parametrize(
    "method", [rootfree.IFShampoo, rootfree.IFWhitening, rootfree.IFFullAdagrad]
)
def test_a_given_curvature_at_the_end_of_the_range(method):
    options = {} if method is rootfree.IFWhitening else B
    p = nn.Parameter(torch.ones(8, 6))
    optimizer = method([p], curvature=LargeOnce(), update_every=1, **options)
    for step in range(4):
        p.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    assert optimizer.skipped_steps == 0
    assert finite(optimizer)


class Jumping(SquaredGradients):
    """Curvature of a size that an entry may have, in one of three forms."""

    def __init__(self, form):
        self.form, self.size = form, 1.0

    def of(self, p, *, batch_size):
        V = torch.randn(3, *p.shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
        if self.form == "outer products":
            return rootfree.SumOfOuterProducts(self.size * V)
        if self.form == "diagonal":
            return rootfree.DiagonalCurvature(self.size * V[0].abs())
        factors = [self.size * torch.eye(d) for d in p.shape]
        return rootfree.KroneckerCurvature(tuple(factors), tuple(p.shape))


@pytest.mark.parametrize("usual", [1.0, 1e-6, 0.0], ids="after {:g}".format)
@pytest.mark.parametrize("form", ["outer products", "diagonal", "kronecker"])
@pytest.mark.parametrize("method", [rootfree.IFShampoo, rootfree.IFWhitening, rootfree.RFShampoo])
def test_a_given_curvature_of_any_size(method, form, usual):
    """Entries of 10³⁶ and 3·10³⁸: their products with factors, and their sums, leave the range."""
    options = {} if method is rootfree.IFWhitening else B
    for large in (1e25, 1e36, 3e38):
        ps = [nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(5))]
        curvature = Jumping(form)
        optimizer = method(ps, curvature=curvature, update_every=1, **options)
        for step, size in enumerate([usual] * 5 + [large] + [usual] * 3):
            curvature.size = size
            for p in ps:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        assert optimizer.skipped_steps == 0
        assert finite(optimizer), large


@pytest.mark.parametrize("method", METHODS)
def test_squares_beyond_double_precision(method):
    """Gradients of 10²⁰⁰ and 10³⁰⁰ in float64: their squares are infinite."""

    usual = train(METHODS[method], 1.0, dtype=torch.float64)[2]
    for factor in (1e200, 1e300):
        optimizer, _, largest = train(METHODS[method], factor, dtype=torch.float64)
        assert finite(optimizer)
        assert largest <= 3 * usual


@pytest.mark.parametrize("method", [rootfree.RFRMSprop, rootfree.RFAdagrad, rootfree.RFAdamW])
@pytest.mark.parametrize("max_update", [0.03, None])
def test_kernels_limit_outliers_as_the_rules_do(method, max_update):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for fused in (True, False):
        p = nn.Parameter(torch.ones(5, device=device))
        optimizer = method([p], batch_size=16, max_update=max_update, fused=fused)
        for size in (1.0, 1e6, 1.0, 1e25, 3e38):
            p.grad = size * torch.tensor([1.0, -0.5, 0.0, 0.1, -1.0], device=device)
            optimizer.step()
        found.append([p.detach(), *optimizer.state[p].values()])
    for mine, expected in zip(*found, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
