"""Scale and affine invariance of every method, and the paper's worked example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oracles.diagonal import RFAdaGradOracle, RFAdamWOracle, RFRMSPropOracle
from oracles.full_matrix import (
    IFCovarianceOracle,
    IFFactorOracle,
    RFFullMatrixOracle,
)
from oracles.if_shampoo import IFShampooOracle
from oracles.rf_shampoo import RFShampooOracle
from oracles.sampling import relative, rng

STEP: dict[str, Any] = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.02}


def run(oracle: Any, gradient: Callable[[np.ndarray], np.ndarray], steps: int = 8) -> np.ndarray:
    for _ in range(steps):
        oracle.step(gradient(oracle.param))
    return np.asarray(oracle.param)


def averaged(x: np.ndarray) -> np.ndarray:
    """Gradient of a smooth, non-quadratic loss that averages its terms."""
    c = np.linspace(0.5, 2.0, x.size).reshape(x.shape)
    return np.asarray(0.2 * (c * x + np.sin(3 * x) + 0.1 * x.sum()))


def build_scaled(name: str, batch: float, loss: float) -> Any:
    """The method with batch size B, its λ and S₀ scaled by the loss's scale."""
    x = rng(3).normal(size=(3, 2))
    # β₂ small enough for the covariance form, which is not normalised: β₂ B gᵀS⁻¹g < 2
    common: dict[str, Any] = dict(precond_lr=0.05, damping=0.1 * loss, batch_size=batch, **STEP)
    if name == "RF-RMSProp":
        return RFRMSPropOracle(x, initial=loss, **common)
    if name == "RF-AdaGrad":
        return RFAdaGradOracle(x, initial=loss, **common)
    if name == "RF-AdamW":
        return RFAdamWOracle(x, initial=loss, **common)
    if name == "RF full":
        return RFFullMatrixOracle(x, initial=loss * np.eye(6), **common)
    if name == "IF covariance":
        return IFCovarianceOracle(x, initial=np.eye(6) / loss, **common)
    if name == "IF factor":
        return IFFactorOracle(x, initial=np.eye(6) / np.sqrt(loss), **common)
    if name == "RF-Shampoo":
        return RFShampooOracle(x, initial=[np.sqrt(loss) * np.eye(d) for d in (3, 2)], **common)
    return IFShampooOracle(
        x, initial=[loss**-0.25 * np.eye(d) for d in (3, 2)], riemannian_momentum=0.5, **common
    )


@pytest.mark.parametrize(
    "name",
    [
        "RF-RMSProp",
        "RF-AdaGrad",
        "RF-AdamW",
        "RF full",
        "IF covariance",
        "IF factor",
        "RF-Shampoo",
        "IF-Shampoo",
    ],
)
def test_summed_and_averaged_losses_give_one_trajectory(name: str) -> None:
    batch = 16.0
    mean = run(build_scaled(name, batch, 1.0), averaged)
    total = run(build_scaled(name, 1.0, batch), lambda x: batch * averaged(x))
    assert relative(total, mean) < 1e-11
    left_out = run(build_scaled(name, 1.0, 1.0), averaged)
    assert relative(left_out, mean) > 1e-3  # B matters


def test_gradient_scaled_start_is_scale_invariant() -> None:
    x = rng(3).normal(size=(3, 2))
    common: dict[str, Any] = dict(precond_lr=0.2, init_scale="gradient", **STEP)
    mean = run(IFShampooOracle(x, batch_size=16.0, **common), averaged)
    total = run(IFShampooOracle(x, **common), lambda p: 16.0 * averaged(p))
    assert relative(total, mean) < 1e-11


@pytest.mark.parametrize("method", [RFRMSPropOracle, RFAdaGradOracle])
def test_diagonal_methods_are_invariant_to_diagonal_reparametrisation(method: Any) -> None:
    a = np.exp(rng(1).normal(size=4))
    x = rng(2).normal(size=4)
    common: dict[str, Any] = dict(precond_lr=0.2, batch_size=4.0, **STEP)
    original = run(method(x, **common), averaged)
    moved = run(method(x / a, initial=a**2, **common), lambda y: a * averaged(a * y))
    assert relative(a * moved, original) < 1e-11


@pytest.mark.parametrize("form", ["root-free", "covariance", "factor"])
def test_full_matrix_methods_are_invariant_to_any_reparametrisation(form: str) -> None:
    a = rng(1).normal(size=(4, 4)) + 2 * np.eye(4)
    back = np.linalg.inv(a)
    x = rng(2).normal(size=4)
    common: dict[str, Any] = dict(precond_lr=0.02, batch_size=4.0, **STEP)

    def gradient(y: np.ndarray) -> np.ndarray:
        return np.asarray(a.T @ averaged(a @ y))

    methods: dict[str, tuple[Any, np.ndarray]] = {
        "root-free": (RFFullMatrixOracle, a.T @ a),
        "covariance": (IFCovarianceOracle, back @ back.T),
        "factor": (IFFactorOracle, back),
    }
    method, initial = methods[form]
    original = run(method(x, **common), averaged)
    moved = run(method(back @ x, initial=initial, **common), gradient)
    assert relative(a @ moved, original) < 1e-9


@pytest.mark.parametrize("form", ["root-free", "inverse-free"])
def test_shampoo_is_invariant_to_kronecker_reparametrisation(form: str) -> None:
    e, f = rng(1).normal(size=(3, 3)) + 2 * np.eye(3), rng(4).normal(size=(2, 2)) + 2 * np.eye(2)
    x = rng(2).normal(size=(3, 2))
    common: dict[str, Any] = dict(precond_lr=0.2, batch_size=4.0, **STEP)
    back = [np.linalg.inv(e), np.linalg.inv(f)]

    def gradient(y: np.ndarray) -> np.ndarray:  # W = E Y Fᵀ
        return np.asarray(e.T @ averaged(e @ y @ f.T) @ f)

    y = back[0] @ x @ back[1].T
    if form == "root-free":
        original = run(RFShampooOracle(x, **common), averaged)
        moved = run(RFShampooOracle(y, initial=[e.T @ e, f.T @ f], **common), gradient)
    else:
        common["riemannian_momentum"] = 0.5
        original = run(IFShampooOracle(x, **common), averaged)
        moved = run(IFShampooOracle(y, initial=back, **common), gradient)
    assert relative(e @ moved @ f.T, original) < 1e-9


@pytest.mark.parametrize(
    "method", [RFRMSPropOracle, RFFullMatrixOracle, RFShampooOracle], ids=lambda m: m.__name__
)
def test_worked_example_of_the_paper(method: Any) -> None:
    """½a² from a₀ = 2, and in b = a/2: 1.5 and 0.75 agree; with the root, 1 and 0 do not."""
    settings: dict[str, Any] = {"lr": 1.0, "precond_lr": 1.0}
    a = method(np.array([2.0]), **settings).step(np.array([2.0]))
    b = method(np.array([1.0]), **settings).step(np.array([4.0]))
    assert a[0] == pytest.approx(1.5, abs=1e-15)
    assert b[0] == pytest.approx(0.75, abs=1e-15)
    assert 2.0 - 2.0 / np.sqrt(2.0**2) == 1.0
    assert 1.0 - 4.0 / np.sqrt(4.0**2) == 0.0
