"""Structured factors, shapes, schedule, momentum and the options beyond the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oracles.diagonal import RFAdaGradOracle, RFAdamWOracle
from oracles.if_shampoo import IFShampooOracle
from oracles.kronecker import kron_all, squeeze
from oracles.momentum import rms
from oracles.projections import projection, support
from oracles.rf_shampoo import RFShampooOracle
from oracles.sampling import EXACT, relative, rng

STRUCTURES = [
    "dense",
    "diagonal",
    "block_diagonal:2",
    "lower_triangular",
    "upper_triangular",
    "lower_toeplitz",
    "upper_toeplitz",
    "hierarchical:2,1",
]


# --- structures --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRUCTURES)
def test_projection_is_orthogonal_in_the_local_coordinates(name: str) -> None:
    d = 5
    project = projection(name)
    h = rng(1).normal(size=(d, d))
    h = h + h.T
    x = project(h)
    assert not np.any(x[~support(name, d)])
    assert relative(project(np.eye(d)), np.eye(d)) < EXACT
    for seed in range(10):  # sym(P(h)) - h is orthogonal to sym(Y) for every Y in the structure
        y = project(rng(seed).normal(size=(d, d)))
        assert abs(np.sum(((x + x.T) / 2 - h) * (y + y.T) / 2)) < 1e-11


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("exponential", ["truncated", "exact"])
def test_structured_factors_stay_inside_their_structure(name: str, exponential: Any) -> None:
    oracle = IFShampooOracle(
        np.zeros((5, 4)),
        lr=0.1,
        precond_lr=0.5,
        damping=0.1,
        structures=name,
        exponential=exponential,
    )
    for t in range(6):
        oracle.step(rng(t).normal(size=(5, 4)))
    for k in oracle.factors:
        assert not np.any(np.abs(k[~support(name, len(k))]) > EXACT)
        assert np.min(np.linalg.svd(k, compute_uv=False)) > 0
        if name.endswith("toeplitz"):
            assert relative(k[1:, 1:], k[:-1, :-1]) < EXACT


def test_a_callable_is_a_structure() -> None:
    def only_diagonal(h: np.ndarray) -> np.ndarray:
        return np.diag(np.diag(h))

    common: dict[str, Any] = {"lr": 0.1, "precond_lr": 0.5}
    by_name = IFShampooOracle(np.zeros((3, 2)), structures=["diagonal", "dense"], **common)
    by_hook = IFShampooOracle(np.zeros((3, 2)), structures=[only_diagonal, "dense"], **common)
    g = rng(1).normal(size=(3, 2))
    assert np.array_equal(by_name.step(g), by_hook.step(g))


# --- shapes, schedule and the options beyond the paper -----------------------------------------


@pytest.mark.parametrize("method", [RFShampooOracle, IFShampooOracle])
def test_axes_of_size_one_are_squeezed(method: Any) -> None:
    common: dict[str, Any] = {"lr": 0.1, "precond_lr": 0.2, "damping": 0.1, "batch_size": 3.0}
    g = rng(1).normal(size=(3, 1, 2, 1))
    wide, narrow = method(np.zeros(g.shape), **common), method(np.zeros((3, 2)), **common)
    assert wide.dims == (3, 2)
    assert np.array_equal(squeeze(wide.step(g)), narrow.step(squeeze(g)))
    scalar, vector = method(np.array(1.0), **common), method(np.array([1.0]), **common)
    assert scalar.step(np.array(0.5)) == vector.step(np.array([0.5]))[0]


def test_update_every_refreshes_at_steps_0_t_2t() -> None:
    common: dict[str, Any] = {"lr": 0.1, "precond_lr": 0.2}
    by_number = IFShampooOracle(np.zeros((3, 2)), update_every=3, **common)
    by_schedule = IFShampooOracle(np.zeros((3, 2)), update_every=lambda t: t % 3 == 0, **common)
    moved = []
    for t in range(7):
        g, before = rng(t).normal(size=(3, 2)), by_number.factors[0]
        assert np.array_equal(by_number.step(g), by_schedule.step(g))
        moved.append(not np.array_equal(before, by_number.factors[0]))
    assert moved == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("structure", ["dense", "lower_triangular"])
def test_factor_norms_are_those_of_the_singular_values(structure: str) -> None:
    x, g = np.zeros((3, 2)), 5 * rng(2).normal(size=(3, 2))
    common: dict[str, Any] = {"lr": 0.1, "precond_lr": 0.2, "structures": structure}
    for kind in ("frobenius", "spectral"):
        oracle = IFShampooOracle(x, factor_norm=kind, **common)
        oracle.step(g)
        for m, k, norm in zip(oracle.tangents, oracle.factors, oracle.norms, strict=True):
            values = np.sqrt(np.linalg.eigvalsh(m.T @ m))
            size = max(values) if kind == "spectral" else np.sqrt(np.sum(values**2))
            assert norm == pytest.approx(size, rel=1e-12)
            assert norm > 1
            assert relative(k, np.eye(len(k)) - 0.2 * m / size) < EXACT


def test_update_rms_and_its_cap() -> None:
    x, g = rng(1).normal(size=(3, 2)), rng(2).normal(size=(3, 2))
    common: dict[str, Any] = {"lr": 0.1, "precond_lr": 0.2, "momentum": 0.9, "weight_decay": 0.5}
    matched = IFShampooOracle(x, update_rms=0.2, **common)
    decayed = x * (1 - 0.1 * 0.5)
    assert rms(matched.step(g) - decayed) == pytest.approx(0.1 * 0.2, rel=1e-12)
    before = matched.param * (1 - 0.1 * 0.5)
    assert rms(matched.step(-g) - before) == pytest.approx(0.1 * 0.2, rel=1e-12)
    capped = IFShampooOracle(x, max_update_rms=0.3, **{**common, "weight_decay": 0.0})
    assert rms(capped.step(g) - x) == pytest.approx(0.1 * 0.3, rel=1e-12)
    inactive = IFShampooOracle(x, max_update_rms=1e3, **common)
    free = IFShampooOracle(x, **common)
    assert np.array_equal(inactive.step(g), free.step(g))
    assert np.all(np.isfinite(IFShampooOracle(x, update_rms=0.2, **common).step(0 * g)))


def test_gradient_scaled_start_normalises_the_first_curvature() -> None:
    g = 0.01 * rng(2).normal(size=(3, 2))
    oracle = IFShampooOracle(
        np.zeros((3, 2)), lr=0.1, precond_lr=1e-12, batch_size=8.0, init_scale="gradient"
    )
    oracle.step(0 * g)
    assert oracle.waits_for_gradient
    oracle.step(g)
    k = kron_all(oracle.factors)  # S⁻¹ = (B mean G²)⁻¹ I
    assert relative(k @ k.T, np.eye(6) / (8.0 * np.mean(g**2))) < 1e-9


def test_heavy_ball_and_decay() -> None:
    """Two steps by hand: s = 1 + 0.5·2·g², U = g/(s + 0.1), M <- 0.9M + U + 0.2W, W <- W - 0.1M."""
    oracle = RFAdaGradOracle(
        np.array([1.0]),
        lr=0.1,
        precond_lr=0.5,
        damping=0.1,
        batch_size=2.0,
        momentum=0.9,
        weight_decay=0.2,
    )
    m = 2.0 / 5.1 + 0.2
    w = 1.0 - 0.1 * m
    assert oracle.step(np.array([2.0]))[0] == pytest.approx(w, rel=1e-15)
    m = 0.9 * m + 1.0 / 6.1 + 0.2 * w
    assert oracle.step(np.array([1.0]))[0] == pytest.approx(w - 0.1 * m, rel=1e-15)


def by_hand(**options: Any) -> tuple[float, float]:
    """Two steps of the above with Nesterov's momentum or decoupled decay, from W = 1."""
    common = {"lr": 0.1, "precond_lr": 0.5, "damping": 0.1, "batch_size": 2.0, "momentum": 0.9}
    oracle = RFAdaGradOracle(np.array([1.0]), weight_decay=0.2, **common, **options)
    return oracle.step(np.array([2.0]))[0], oracle.step(np.array([1.0]))[0]


def test_nesterov_by_hand() -> None:
    """v = U + κW, M <- 0.9M + v, W <- W - 0.1(v + 0.9M)."""
    v = 2.0 / 5.1 + 0.2
    first = 1.0 - 0.1 * (v + 0.9 * v)
    m, v = v, 1.0 / 6.1 + 0.2 * first
    second = first - 0.1 * (v + 0.9 * (0.9 * m + v))
    assert by_hand(nesterov=True) == pytest.approx((first, second), rel=1e-15)


def test_decoupled_decay_by_hand() -> None:
    """M <- 0.9M + U, W <- 0.98W - 0.1M; with Nesterov W <- 0.98W - 0.1(U + 0.9M)."""
    u, v = 2.0 / 5.1, 1.0 / 6.1
    first = 0.98 - 0.1 * u
    second = 0.98 * first - 0.1 * (0.9 * u + v)
    assert by_hand(decoupled_weight_decay=True) == pytest.approx((first, second), rel=1e-15)
    first = 0.98 - 0.1 * (u + 0.9 * u)
    second = 0.98 * first - 0.1 * (v + 0.9 * (0.9 * u + v))
    found = by_hand(decoupled_weight_decay=True, nesterov=True)
    assert found == pytest.approx((first, second), rel=1e-15)


def test_rf_adamw_by_hand() -> None:
    oracle = RFAdamWOracle(
        np.array([1.0]),
        lr=0.1,
        precond_lr=0.25,
        momentum=0.9,
        damping=0.1,
        weight_decay=0.2,
        batch_size=4.0,
    )
    # m = 0.1·2, v = 0.75·(1/4) + 0.25·4, B·v = 0.75 + 4
    assert oracle.step(np.array([2.0]))[0] == pytest.approx(0.98 - 0.1 * 0.2 / 4.85, rel=1e-14)
