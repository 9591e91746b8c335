"""The oracles against each other and against the specification's written formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from oracles import curvature as curvatures
from oracles.full_matrix import (
    IFCovarianceOracle,
    IFFactorOracle,
    RFFullMatrixOracle,
    woodbury,
)
from oracles.if_shampoo import IFShampooOracle
from oracles.kronecker import kron_all, partial_trace
from oracles.rf_shampoo import RFShampooOracle
from oracles.sampling import EXACT, positive_definite, relative, rng

SHAPES = [(4,), (3, 2), (2, 3, 2), (2, 2, 3, 2)]


def slope(difference: Callable[[float], float]) -> float:
    """Exponent of difference(β₂) for β₂ -> 0, by a log-log fit."""
    betas = np.logspace(-4, -2.5, 6)
    return float(np.polyfit(np.log(betas), np.log([difference(b) for b in betas]), 1)[0])


# --- the dense algebra itself -------------------------------------------------------------------


def test_kron_acts_on_the_row_major_vec_and_partial_trace_undoes_kron() -> None:
    a, b, c = (rng(s).normal(size=(d, d)) for s, d in [(1, 2), (2, 3), (3, 2)])
    g = rng(4).normal(size=(2, 3, 2))
    by_modes = np.einsum("ai,bj,ck,ijk->abc", a, b, c, g)
    assert relative((kron_all([a, b, c]) @ g.reshape(-1)).reshape(g.shape), by_modes) < EXACT
    kept = partial_trace(kron_all([a, b, c]), [2, 3, 2], 1)
    assert relative(kept, np.trace(a) * np.trace(c) * b) < EXACT


# --- the oracles' curvature is the formula of the specification --------------------------------


def matricise(g: np.ndarray, n: int) -> np.ndarray:
    return np.moveaxis(g, n, 0).reshape(g.shape[n], -1)


@pytest.mark.parametrize("shape", SHAPES)
def test_rf_shampoo_curvature_is_the_written_formula(shape: tuple[int, ...]) -> None:
    g, lam, batch, beta = rng(1).normal(size=shape), 0.3, 7.0, 0.2
    start = [positive_definite(d, n) for n, d in enumerate(shape)]
    oracle = RFShampooOracle(
        np.zeros(shape), lr=0.1, precond_lr=beta, damping=lam, batch_size=batch, initial=start
    )
    oracle.step(g)
    for n, d in enumerate(shape):
        inverses = [np.linalg.inv(s) for j, s in enumerate(start) if j != n]
        g_n, d_n = matricise(g, n), g.size // d
        traces = np.prod([np.trace(s) for s in inverses])
        h = batch * g_n @ kron_all(inverses) @ g_n.T + lam * traces * np.eye(d)
        expected = (1 - beta) * start[n] + beta / d_n * h
        assert relative(oracle.factors[n], expected) < EXACT


@pytest.mark.parametrize("shape", SHAPES)
def test_if_shampoo_curvature_is_the_written_formula(shape: tuple[int, ...]) -> None:
    g, lam, batch = rng(1).normal(size=shape), 0.3, 7.0
    start = [rng(n).normal(size=(d, d)) + 2 * np.eye(d) for n, d in enumerate(shape)]
    oracle = IFShampooOracle(
        np.zeros(shape), lr=0.1, precond_lr=0.2, damping=lam, batch_size=batch, initial=start
    )
    oracle.step(g)
    hat = g
    for n, k in enumerate(start):
        hat = np.moveaxis(np.tensordot(k.T, hat, axes=(1, n)), 0, n)
    for n, d in enumerate(shape):
        g_n, d_n = matricise(hat, n), g.size // d
        traces = np.prod([np.trace(k.T @ k) / len(k) for j, k in enumerate(start) if j != n])
        gram = start[n].T @ start[n]
        h = 0.5 * (batch * g_n @ g_n.T / d_n + lam * traces * gram - np.eye(d))
        assert relative(oracle.tangents[n], h) < EXACT
        expected = start[n] @ (np.eye(d) - 0.2 * h / max(1.0, float(np.linalg.norm(h))))
        assert relative(oracle.factors[n], expected) < EXACT


# --- equalities --------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
def test_if_shampoo_with_one_axis_is_the_truncated_factor_form(norm: Any, gamma: float) -> None:
    common: dict[str, Any] = {
        "lr": 0.1,
        "precond_lr": 0.3,
        "gamma": gamma,
        "damping": 0.1,
        "batch_size": 3.0,
        "momentum": 0.9,
        "weight_decay": 0.01,
        "riemannian_momentum": 0.5,
        "factor_norm": norm,
        "exponential": "truncated",
    }
    start = rng(9).normal(size=5)
    seven, five = IFShampooOracle(start, **common), IFFactorOracle(start, **common)
    sizes = []
    for t in range(20):
        g = rng(t).normal(size=5) * (3.0 if t % 2 else 0.05)
        assert relative(seven.step(g), five.step(g)) < EXACT
        sizes += seven.norms
    assert min(sizes) < 1 < max(sizes)  # both branches of max(1, ‖m‖)


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
def test_woodbury_is_the_direct_inverse(gamma: float) -> None:
    oracle = RFFullMatrixOracle(np.zeros(5), lr=0.1, precond_lr=0.1, gamma=gamma, batch_size=4.0)
    inverse = np.eye(5)
    for t in range(20):
        g = rng(t).normal(size=5)
        oracle.step(g)
        inverse = woodbury(inverse, g, precond_lr=0.1, gamma=gamma, batch=4.0)
        assert relative(inverse, np.linalg.inv(oracle.precond)) < 1e-11


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
def test_covariance_form_has_its_two_closed_forms_and_stays_positive_definite(gamma: float) -> None:
    batch = 2.0
    for beta in [1e-3, 0.5, 2.0, 50.0]:
        start = positive_definite(4, 3)
        oracle = IFCovarianceOracle(
            np.zeros(4), lr=0.1, precond_lr=beta, gamma=gamma, batch_size=batch, initial=start
        )
        g = rng(5).normal(size=4)
        oracle.step(g)
        # ½A[I + (I-β₂N)(I-β₂N)ᵀ]Aᵀ with S⁻¹ = AAᵀ, N = AᵀHA - γI
        a = np.linalg.cholesky(start)
        i = np.eye(4)
        n = a.T @ (batch * np.outer(g, g)) @ a - gamma * i
        symmetric = 0.5 * a @ (i + (i - beta * n) @ (i - beta * n).T) @ a.T
        assert relative(oracle.inverse, symmetric) < 1e-11
        # O(d²): only S⁻¹ and vvᵀ
        v = start @ g
        q = g @ v
        quick = (1 + beta * gamma + beta**2 * gamma**2 / 2) * start
        quick = quick + (
            -beta * batch - beta**2 * gamma * batch + beta**2 * batch**2 * q / 2
        ) * np.outer(v, v)
        assert relative(oracle.inverse, quick) < 1e-11
        assert np.linalg.eigvalsh(oracle.inverse)[0] > 0


def test_covariance_form_stays_positive_definite_for_an_indefinite_curvature() -> None:
    h = rng(2).normal(size=(4, 4))
    oracle = IFCovarianceOracle(np.zeros(4), lr=0.1, precond_lr=3.0)
    oracle.step(rng(3).normal(size=4), curvature=h + h.T)
    assert np.linalg.eigvalsh(oracle.inverse)[0] > 0


def test_every_kind_of_curvature_is_one_dense_matrix() -> None:
    g = rng(1).normal(size=(3, 2))
    outer = curvatures.gradient_outer_product(g, 5.0)
    assert relative(curvatures.sum_of_outer_products(np.sqrt(5.0) * g[None]), outer) < EXACT
    left, right = positive_definite(3, 1), positive_definite(2, 2)
    kfac = curvatures.kronecker([left, right])
    oracle = IFShampooOracle(np.zeros((3, 2)), lr=0.1, precond_lr=0.1, damping=0.2)
    oracle.step(g, curvature=kfac)
    # SINGD's form: H_1 scaled by the average trace of the other factor
    expected = 0.5 * (left * np.trace(right) / 2 + 0.2 * np.eye(3) - np.eye(3))
    assert relative(oracle.tangents[0], expected) < EXACT
    same = IFShampooOracle(np.zeros((3, 2)), lr=0.1, precond_lr=0.1, batch_size=5.0)
    given = IFShampooOracle(np.zeros((3, 2)), lr=0.1, precond_lr=0.1)
    assert relative(given.step(g, curvature=outer), same.step(g)) < EXACT
    h = rng(4).random((3, 2))
    assert np.array_equal(curvatures.diagonal(h), np.diag(h.reshape(-1)))


# --- first-order equivalence: the difference shrinks as β₂² -------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize("form", ["covariance", "factor", "factor, truncated"])
def test_inverse_free_full_matrix_is_root_free_to_first_order(
    form: str, identity: bool, gamma: float
) -> None:
    g = rng(7).normal(size=4)
    s = np.eye(4) if identity else positive_definite(4, 8)
    inverse = np.linalg.inv(s)

    def difference(beta: float) -> float:
        common: dict[str, Any] = {
            "lr": 0.1,
            "precond_lr": beta,
            "gamma": gamma,
            "damping": 0.3,
            "batch_size": 2.0,
        }
        three = RFFullMatrixOracle(np.zeros(4), initial=s, **common)
        three.step(g)
        if form == "covariance":
            four = IFCovarianceOracle(np.zeros(4), initial=inverse, **common)
            four.step(g)
            result = four.inverse
        else:
            five = IFFactorOracle(
                np.zeros(4),
                initial=np.linalg.cholesky(inverse),
                exponential="exact" if form == "factor" else "truncated",
                **common,
            )
            five.step(g)
            result = five.factor @ five.factor.T
        return float(np.linalg.norm(result - np.linalg.inv(three.precond)))

    assert abs(slope(difference) - 2) < 0.1


def shampoo_difference(
    beta: float,
    *,
    shape: tuple[int, ...],
    starts: Sequence[np.ndarray],
    norm: Any,
    scale: float,
    gamma: float = 1.0,
    gamma_if: float | None = None,
) -> float:
    g = scale * rng(7).normal(size=shape)
    common: dict[str, Any] = {"lr": 0.1, "precond_lr": beta, "damping": 0.3, "batch_size": 2.0}
    six = RFShampooOracle(np.zeros(shape), initial=starts, gamma=gamma, **common)
    roots = [np.linalg.cholesky(np.linalg.inv(s)) for s in starts]
    seven = IFShampooOracle(
        np.zeros(shape),
        initial=roots,
        factor_norm=norm,
        gamma=gamma if gamma_if is None else gamma_if,
        **common,
    )
    six.step(g)
    seven.step(g)
    if norm is not None:
        assert max(seven.norms) <= 1, "the step was normalised: not the claim's setting"
    return max(
        float(np.linalg.norm(k @ k.T - np.linalg.inv(s)))
        for k, s in zip(seven.factors, six.factors, strict=True)
    )


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_if_shampoo_is_rf_shampoo_to_first_order(
    shape: tuple[int, ...], identity: bool, gamma: float
) -> None:
    starts = [np.eye(d) if identity else positive_definite(d, 8 + n) for n, d in enumerate(shape)]
    unnormalised = partial(
        shampoo_difference, shape=shape, starts=starts, norm=None, scale=1.0, gamma=gamma
    )
    assert abs(slope(unnormalised) - 2) < 0.1
    # with the paper's normalisation too, where it is inactive: ‖m‖ <= 1
    small = partial(
        shampoo_difference, shape=shape, starts=starts, norm="frobenius", scale=0.1, gamma=gamma
    )
    assert abs(slope(small) - 2) < 0.1


def test_a_wrong_constant_shows_in_the_slope() -> None:
    starts = [positive_definite(d, 8 + n) for n, d in enumerate((3, 2))]
    wrong = partial(
        shampoo_difference, shape=(3, 2), starts=starts, norm=None, scale=1.0, gamma_if=0.9
    )
    assert abs(slope(wrong) - 1) < 0.1
