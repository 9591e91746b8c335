"""The full-matrix methods with ``safeguard=True``: first tries on convex problems, and range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import Tensor, nn

import rootfree
from rootfree.curvature import OuterProducts
from rootfree.rules.full_matrix import if_factor_rank_one_
from rootfree.rules.if_shampoo import mean_squares, move_factors_, tangents
from rootfree.structures import frobenius_norm, make_structure

METHODS: dict[str, Callable[..., Any]] = {
    "RFFullAdagrad": rootfree.RFFullAdagrad,
    "IFFullAdagrad": rootfree.IFFullAdagrad,
    "IFFullAdagrad-covariance": lambda ps, **o: rootfree.IFFullAdagrad(ps, form="covariance", **o),
}


@pytest.fixture(params=METHODS)
def method(request) -> Callable[..., Any]:
    return METHODS[request.param]


# --- convex problems ---------------------------------------------------------------------------


def _standard(X: np.ndarray) -> np.ndarray:
    return (X - X.mean(0)) / X.std(0)


def _problem(name: str) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    if name == "breast cancer":
        data = load_breast_cancer()
        X, y = _standard(data.data), data.target
        loss = nn.functional.binary_cross_entropy_with_logits
    else:
        data = load_diabetes(scaled=False)
        X = data.data if "raw features" in name else _standard(data.data)
        y = data.target if "raw targets" in name else _standard(data.target)
        loss = nn.functional.mse_loss
    return torch.tensor(X).float(), torch.tensor(y).float(), loss


def _train(name: str, make: Callable[..., Any], *, B: int | None, steps: int = 300) -> float:
    """The loss over all data in the end; the first is one, or 0.69 for breast cancer."""
    X, y, loss = _problem(name)
    generator = torch.Generator().manual_seed(3)
    model = nn.Linear(X.shape[1], 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = make(model.parameters(), B or len(X))
    for _ in range(steps):
        rows = slice(None) if B is None else torch.randint(len(X), (B,), generator=generator)
        optimizer.zero_grad()
        loss(model(X[rows]).squeeze(1), y[rows]).backward()
        optimizer.step()
    return float(loss(model(X).squeeze(1), y).detach())


@pytest.mark.parametrize("gamma", [0.0, 1.0])
@pytest.mark.parametrize("B", [64, None])
@pytest.mark.parametrize("name", ["breast cancer", "diabetes", "diabetes, raw targets"])
def test_defaults_end_below_gradient_descent(method, name, B, gamma):
    """Targets of size 150 make B·ggᵀ 10⁴ times the curvature: unscaled, nothing moves."""
    ours = _train(name, lambda ps, b: method(ps, batch_size=b, gamma=gamma), B=B)
    sgd = _train(name, lambda ps, b: torch.optim.SGD(ps, lr=0.1, momentum=0.9), B=B)
    assert ours < 1.002 * sgd


@pytest.mark.parametrize("gamma", [0.0, 1.0])
@pytest.mark.parametrize("B", [64, None])
def test_defaults_learn_where_gradient_descent_diverges(method, B, gamma):
    """Features of 100 beside features of one: curvatures from 1 to 10⁵. The minimum is 0.48."""
    name = "diabetes, raw features"
    assert not _train(name, lambda ps, b: torch.optim.SGD(ps, lr=0.1, momentum=0.9), B=B) < 1e6
    assert _train(name, lambda ps, b: method(ps, batch_size=b, gamma=gamma), B=B) < 0.9


# --- range -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 1.0])
@pytest.mark.parametrize("outliers", [(1e25, 0), (1e6, 20), (1e25, 20), (0.0, 20)], ids=str)
def test_outliers_leave_parameters_in_place_and_training_goes_on(method, outliers, gamma):
    """A quadratic with curvatures 0.1 to 1; three gradients are outliers, or zero for long."""
    size, at = outliers
    curvature = torch.logspace(-1, 0, 8)
    p = nn.Parameter(torch.ones(8))
    optimizer = method([p], batch_size=32, gamma=gamma)
    length = 1000 if size == 0 else 3
    for step in range(at + length + 600):
        gradient = curvature * p.detach()
        hit = at <= step < at + length
        p.grad = size * (gradient + 0.1).sign() if hit else gradient
        optimizer.step()
        assert p.abs().max() < 10
    assert (curvature * p.square()).sum() < 1e-2 * curvature.sum()


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_a_block_that_has_outgrown_its_first_gradients_begins_anew(method, gamma):
    """Gradients of 10⁻⁶ for 30 steps, then those of a quadratic: it is solved as from a start."""
    curvature = torch.logspace(-1, 0, 8)
    p = nn.Parameter(torch.ones(8))
    optimizer = method([p], batch_size=32, gamma=gamma)
    for step in range(630):
        p.grad = (1e-6 if step < 30 else 1.0) * curvature * p.detach()
        optimizer.step()
        assert p.abs().max() < 10
    assert (curvature * p.square()).sum() < 1e-2 * curvature.sum()


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1e-42),
        (torch.float32, 1e-39),
        (torch.float64, 1e-310),
        (torch.float64, 1e-170),
    ],
)
def test_first_gradients_without_an_inverse_are_waited_out(method, dtype, size):
    curvature = torch.logspace(-1, 0, 8, dtype=dtype)
    p = nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = method([p], batch_size=32)
    for step in range(603):
        p.grad = (size if step < 3 else 1.0) * curvature * p.detach()
        optimizer.step()
        assert p.abs().max() < 10
    assert (curvature * p.square()).sum() < 1e-2 * curvature.sum()


# --- the rule ----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    d=st.integers(1, 6),
    size=st.floats(-3, 2).map(lambda e: 10**e),
    beta2=st.floats(0.001, 0.99),
    norm=st.sampled_from([None, "frobenius", "spectral"]),
    seed=st.integers(0, 2**31),
)
def test_the_factor_form_of_rank_one_is_the_general_one(d, size, beta2, norm, seed):
    """For two blocks at once; the general path makes m and its norm from d×d×d products."""
    rng = np.random.default_rng(seed)
    A = torch.tensor(rng.normal(size=(2, d, d)))
    g = size * torch.tensor(rng.normal(size=(2, d)))
    structures = (make_structure("dense", d),)
    general, one = A.clone(), A.clone()
    means = mean_squares([A], [1.0], structures, wide=A.dtype)
    H = OuterProducts(g, weight=7)
    hs = tangents([A], [1.0], means, H, structures, lam=0.0, gamma=0.0)
    norms = {
        None: lambda n, m: m.new_ones(len(m)),
        "frobenius": lambda n, m: frobenius_norm(structures[n], m),
        "spectral": lambda n, m: structures[n].spectral_bound(m, dtype=m.dtype),
    }
    move_factors_([general], hs, structures, beta2=[beta2], norm=norms[norm], dtype=A.dtype)
    if_factor_rank_one_(one, g, beta2=beta2, B=7, norm=norm)
    # Without a norm the change may be much larger than A: eps times the largest term.
    torch.testing.assert_close(one, general, rtol=1e-12, atol=1e-13 * float(general.abs().max()))


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_against_an_oracle(gamma):
    """RFFullAdagrad in float64, from S itself: the unit grows, is undone by a jump, and stays."""
    B, beta1, beta2, alpha, d = 8, 0.06, 0.01, 0.95, 5
    rng = np.random.default_rng(0)
    gs = [30 * rng.normal(size=d) * (10 if t == 12 else 1) for t in range(20)]
    p = nn.Parameter(torch.zeros(d, dtype=torch.float64))
    optimizer = rootfree.RFFullAdagrad([p], batch_size=B, gamma=gamma)
    x, m, last, M = np.zeros(d), np.zeros(d), np.zeros(d), np.zeros((d, d))
    s, first, grows = 0.0, B * gs[0] @ gs[0], True
    for g in gs:
        p.grad = torch.tensor(g)
        optimizer.step()
        if grows:
            M[:] = 0
            large = B * g @ g > 16 * first
            s = 1.0 if s == 0 else s / 256 if large else min(2 * s, first)
            grows = not large and s < first
        seen = min(1.0, 1e3 * s / (B * g @ g))
        M = (1 - beta2 * gamma) * M + beta2 * B * seen / s * np.outer(g, g)
        u = np.linalg.solve(np.eye(d) + M, g)
        u /= max(1.0, beta2 * B / s * (g @ u))
        direction, last = u - alpha * last, u if grows else np.zeros(d)
        m = alpha * m + direction
        x = x - beta1 * (direction + alpha * m)
        np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-9)
    assert not grows
    assert s < first / 256
    assert math.isclose(float(optimizer.state[p]["block0.unit"]), math.sqrt(s), rel_tol=1e-9)
