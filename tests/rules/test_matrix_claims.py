"""Claims of the specification about methods 3 to 7, on the library itself (float64)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rootfree
from rootfree.curvature import OuterProducts
from rootfree.rules.full_matrix import if_covariance_, if_covariance_rank_one_, woodbury_
from rootfree.rules.if_shampoo import mean_squares, move_factors_, tangents
from rootfree.structures import make_structure
from rules.matrix_runs import STRUCTURES, dense_factors

#: The full-matrix rules of the paper.
BARE = {"momentum": 0.0, "nesterov": False, "safeguard": False}
EXACT, INVERSE_FREE = (
    partial(method, **BARE) for method in (rootfree.RFFullAdagrad, rootfree.IFFullAdagrad)
)

# β₂·B·gᵀg is at most 0.03 here: small enough for the next order not to show.
RATES = [1e-3, 3e-4, 1e-4, 3e-5]


def slope(errors: list[float], rates: list[float] = RATES) -> float:
    """Fitted exponent of error ~ β₂^slope."""
    return float(np.polyfit(np.log(rates), np.log(errors), 1)[0])


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape))


def relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


def run(
    make: Callable[..., Any], shape: tuple[int, ...], steps: int = 3, **options: Any
) -> tuple[Any, Tensor]:
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = make([p], lr=0.1, batch_size=4, block_size=None, **options)
    for t in range(steps):
        p.grad = tensor(t, *shape)
        optimizer.step()
    return optimizer, p


def inverses(make: Callable[..., Any], shape: tuple[int, ...], **options: Any) -> list[np.ndarray]:
    """S⁻¹ of every factor after a few steps."""
    optimizer, p = run(make, shape, **options)
    state = optimizer.state[p]
    kept = [state[k][0].numpy() for k in state if ".inverse" in k]
    return kept or [K @ K.T for K in dense_factors(optimizer, p)]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("damping", [0.0, 0.2])
@pytest.mark.parametrize("form", ["covariance", "factor"])
def test_inverse_free_full_matrix_is_the_exact_one_to_first_order(form, damping, gamma):
    """4 <-> 3 and 5 <-> 3: the difference after three steps is O(β₂²)."""
    errors = []
    for beta2 in RATES:
        words = {"precond_lr": beta2, "damping": damping, "gamma": gamma}
        (exact,) = inverses(EXACT, (5,), **words)
        (found,) = inverses(INVERSE_FREE, (5,), form=form, factor_norm=None, **words)
        errors.append(relative(found, exact))
    assert 1.9 < slope(errors) < 2.2
    assert errors[-1] < 1e-3


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("damping", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(5,), (4, 3), (3, 2, 4), (2, 3, 2, 2)], ids=str)
def test_inverse_free_shampoo_is_rf_shampoo_to_first_order(shape, damping, gamma):
    """7 <-> 6."""
    common = {"damping": damping, "gamma": gamma, "update_every": 1}
    errors = []
    for beta2 in RATES:
        words = {"precond_lr": beta2, "init_scale": 1.0, "factor_norm": None, **common}
        exact = inverses(rootfree.RFShampoo, shape, **words)
        found = inverses(rootfree.IFShampoo, shape, structure="dense", **words)
        errors.append(max(relative(a, b) for a, b in zip(found, exact, strict=True)))
    assert 1.9 < slope(errors) < 2.2


def test_a_rate_that_is_off_by_one_per_cent_has_slope_one():
    """The fit tells first order from second."""
    errors = []
    for beta2 in RATES:
        (exact,) = inverses(EXACT, (5,), precond_lr=beta2)
        (found,) = inverses(INVERSE_FREE, (5,), precond_lr=1.01 * beta2, factor_norm=None)
        errors.append(relative(found, exact))
    assert slope(errors) < 1.5


@pytest.mark.parametrize("factor_norm", [None, "frobenius", "spectral"])
@pytest.mark.parametrize("init_scale", [1.0, "gradient"])
def test_one_factor_is_the_factor_form_of_the_full_matrix(factor_norm, init_scale):
    """7 with one factor equals 5, bit for bit."""
    words = {
        "precond_lr": 0.02,
        "damping": 0.1,
        "gamma": 0.7,
        "riemannian_momentum": 0.5,
        "momentum": 0.9,
        "decoupled_weight_decay": False,
        "weight_decay": 0.1,
        "factor_norm": factor_norm,
        "init_scale": init_scale,
        "max_update_rms": None,
        "update_every": 1,
    }
    words |= {"nesterov": False}
    one, p = run(rootfree.IFShampoo, (6,), steps=20, structure="dense", rate_by_rank=False, **words)
    other, q = run(rootfree.IFFullAdagrad, (6,), steps=20, form="factor", safeguard=False, **words)
    assert torch.isfinite(p).all()
    assert torch.equal(p, q)
    assert set(one.state[p]) == set(other.state[q])
    for key in one.state[p]:
        assert torch.equal(one.state[p][key], other.state[q][key])


@pytest.mark.parametrize("name", STRUCTURES)
def test_truncation_is_the_exponential_to_first_order(name):
    """K(I - β₂m) against K exp(-β₂m), from the library's own m."""
    structures = (make_structure(name, 5), make_structure(name, 4))
    Ks = [s.identity(1, dtype=torch.float64, device="cpu") * 0.9 for s in structures]
    G = tensor(0, 1, 5, 4)
    means = mean_squares(Ks, [1.0, 1.0], structures, wide=torch.float64)
    H = OuterProducts(G, weight=10)
    hs = tangents(Ks, [1.0, 1.0], means, H, structures, lam=0.1, gamma=1.0)
    errors = []
    for beta2 in RATES:
        moved = [K.clone() for K in Ks]
        move_factors_(
            moved,
            hs,
            structures,
            beta2=[beta2, beta2],
            norm=lambda n, m: m.new_ones(len(m)),
            dtype=torch.float64,
        )
        exact = [
            s.unpack(K) @ torch.linalg.matrix_exp(-beta2 * s.unpack(h))
            for s, K, h in zip(structures, Ks, hs, strict=True)
        ]
        errors.append(
            max(relative(s.unpack(K), E) for s, K, E in zip(structures, moved, exact, strict=True))
        )
    assert 1.9 < slope(errors) < 2.1


# --- rule 4 ------------------------------------------------------------------------------------

spectra = st.lists(st.floats(-3, 3).map(lambda e: 10**e), min_size=1, max_size=6)


def orthogonal(d: int, seed: int) -> Tensor:
    return torch.linalg.qr(tensor(seed, d, d))[0]


@settings(max_examples=80)
@given(
    spectrum=spectra,
    curvature=st.floats(-4, 4).map(lambda e: 10**e),
    rank=st.integers(0, 6),
    beta2=st.floats(-4, 3).map(lambda e: 10**e),
    gamma=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_covariance_form_is_positive_definite_for_any_rate(
    spectrum, curvature, rank, beta2, gamma, seed
):
    """½A[I + (I-β₂N)(I-β₂N)ᵀ]Aᵀ is at least ½S⁻¹: β₂ up to 1000, any positive H."""
    d = len(spectrum)
    Q = orthogonal(d, seed)
    P = (Q * torch.tensor(spectrum, dtype=torch.float64)) @ Q.T
    V = curvature**0.5 * tensor(seed + 1, d, rank)
    A = torch.linalg.cholesky(P)
    moved = P[None].clone()
    rate = torch.full((1, 1, 1), beta2, dtype=torch.float64)
    if_covariance_(moved, (V @ V.T)[None], beta2=rate, gamma=gamma)
    assert torch.equal(moved, moved.mT)
    N = A.T @ V @ V.T @ A - gamma * torch.eye(d, dtype=torch.float64)
    step = torch.eye(d, dtype=torch.float64) - beta2 * N
    expected = A @ (torch.eye(d, dtype=torch.float64) + step @ step.T) @ A.T / 2
    # The terms of the sum may be larger than the result: measure against the largest of them.
    largest = (1 + beta2 * (N.norm() + gamma)).square() * P.norm()
    assert (moved[0] - expected).norm() < 1e-13 * largest
    least = torch.linalg.eigvalsh(moved[0] - P / 2)[0]
    assert least > -1e-13 * largest


def test_without_the_second_order_term_it_is_not():
    """The first-order rule loses definiteness where β₂·gᵀS⁻¹g·B > 1."""
    P = torch.eye(3, dtype=torch.float64)[None].clone()
    g = torch.ones(1, 3, dtype=torch.float64)
    first_order = P - 1.0 * g.unsqueeze(2) * g.unsqueeze(1)
    assert torch.linalg.eigvalsh(first_order)[0, 0] < 0
    if_covariance_rank_one_(P, g, beta2=torch.ones(1, 1, 1, dtype=torch.float64), B=1, gamma=0.0)
    assert torch.linalg.eigvalsh(P)[0, 0] >= 0.5


@settings(max_examples=40)
@given(
    d=st.integers(1, 6),
    beta2=st.floats(-4, 1).map(lambda e: 10**e),
    gamma=st.floats(0, 1),
    B=st.integers(1, 1000),
    seed=st.integers(0, 2**31),
)
def test_rank_one_form_is_the_general_one(d, beta2, gamma, B, seed):
    A, g = tensor(seed, 2, d, d), tensor(seed + 1, 2, d)
    P = A @ A.mT + torch.eye(d, dtype=torch.float64)
    one, general = P.clone(), P.clone()
    rate = torch.full((2, 1, 1), beta2, dtype=torch.float64)
    if_covariance_rank_one_(one, g, beta2=rate, B=B, gamma=gamma)
    if_covariance_(general, B * g.unsqueeze(2) * g.unsqueeze(1), beta2=rate, gamma=gamma)
    # βBq up to 1e6 enters squared, and cancels at most to what is left of it
    q = (g.unsqueeze(1) @ P @ g.unsqueeze(2)).flatten().max().item()
    assert relative(one, general) < 1e-13 * (1 + beta2 * B * q) ** 2


# --- rule 3 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_woodbury_is_the_direct_inverse(gamma):
    """Without damping, over 30 steps; condition numbers stay below 1e3, eps·steps·that is 7e-12."""
    beta2, B, d = 0.1, 10, 6
    p = nn.Parameter(torch.zeros(d, dtype=torch.float64))
    optimizer = EXACT([p], lr=0.1, batch_size=B, precond_lr=beta2, gamma=gamma, damping=0.0)
    S = torch.eye(d, dtype=torch.float64)
    for t in range(30):
        p.grad = tensor(t, d)
        optimizer.step()
        S = (1 - beta2 * gamma) * S + beta2 * B * torch.outer(p.grad, p.grad)
    found = optimizer.state[p]["block0.inverse"][0]
    assert relative(found, torch.linalg.inv(S)) < 7e-12
    off = torch.linalg.inv(S + 0.01 * beta2 * B * torch.outer(p.grad, p.grad))
    assert relative(off, found) > 1e-6


@settings(max_examples=40)
@given(
    d=st.integers(1, 6),
    beta2=st.floats(-4, 2).map(lambda e: 10**e),
    gamma=st.floats(0, 1),
    B=st.integers(1, 10_000),
    seed=st.integers(0, 2**31),
)
def test_woodbury_for_any_rate(d, beta2, gamma, B, seed):
    gamma = min(gamma, 0.9 / beta2)  # 1 - β₂γ must stay positive
    g, S = tensor(seed, 1, d), torch.eye(d, dtype=torch.float64)
    P = S[None].clone()
    woodbury_(P, g, beta2=beta2, B=B, gamma=gamma)
    S = (1 - beta2 * gamma) * S + beta2 * B * torch.outer(g[0], g[0])
    condition = torch.linalg.cond(S).item()
    # S⁻¹ along g is what is left of a difference: 1 - x/(1 + x) with x = β₂B·gᵀg
    x = beta2 * B * g.square().sum().item() / (1 - beta2 * gamma)
    assert relative(P[0] @ S, np.eye(d)) < 1e-14 * (condition + x) * d
