"""Full-matrix methods on vec(G): root-free (3), inverse-free covariance (4) and factor (5)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import scipy.linalg  # type: ignore[import-untyped, unused-ignore]
from typing_extensions import Unpack

from oracles.curvature import gradient_outer_product
from oracles.kronecker import Array, apply
from oracles.momentum import Common, MomentumOracle

FactorNorm = Literal["frobenius", "spectral"] | None
Exponential = Literal["truncated", "exact"]


def matrix_norm(matrix: Array, kind: FactorNorm) -> float:
    """‖m‖ of the normalised factor step; None switches the normalisation off (returns 0)."""
    if kind is None:
        return 0.0
    return float(np.linalg.norm(matrix, 2 if kind == "spectral" else "fro"))


def retract(
    factor: Array, tangent: Array, *, precond_lr: float, norm: FactorNorm, exponential: Exponential
) -> Array:
    """K <- K E with X = β₂ m / max(1, ‖m‖) and E = I - X (truncated) or exp(-X) (exact)."""
    x = precond_lr * tangent / max(1.0, matrix_norm(tangent, norm))
    if exponential == "exact":
        return np.asarray(factor @ scipy.linalg.expm(-x))
    return np.asarray(factor @ (np.eye(len(x)) - x))


class CurvatureOracle(MomentumOracle):
    """Holds what the matrix methods share: β₂, γ, λ, B and the damped dense curvature H + λI."""

    def __init__(
        self,
        param: Array,
        *,
        precond_lr: float,  # β₂
        gamma: float = 1.0,  # γ
        damping: float = 0.0,  # λ
        batch_size: float = 1.0,  # B
        **common: Unpack[Common],
    ) -> None:
        super().__init__(param, **common)
        self.precond_lr = precond_lr
        self.gamma = gamma
        self.damping = damping
        self.batch_size = batch_size

    def damped(self, grad: Array, curvature: Array | None) -> Array:
        """H + λI, H = B g gᵀ unless curvature is given."""
        if curvature is None:
            curvature = gradient_outer_product(grad, self.batch_size)
        return curvature + self.damping * np.eye(grad.size)


class RFFullMatrixOracle(CurvatureOracle):
    """S <- (1-β₂γ)S + β₂(H + λI); U = S⁻¹g by an explicit inverse; S₀ = I (`initial`)."""

    def __init__(
        self,
        param: Array,
        *,
        precond_lr: float,
        gamma: float = 1.0,
        damping: float = 0.0,
        batch_size: float = 1.0,
        initial: Array | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            param,
            precond_lr=precond_lr,
            gamma=gamma,
            damping=damping,
            batch_size=batch_size,
            **common,
        )
        self.precond = np.eye(self.param.size) if initial is None else np.array(initial)

    def refresh(self, grad: Array, curvature: Array | None) -> None:
        h = self.damped(grad, curvature)
        self.precond = (1 - self.precond_lr * self.gamma) * self.precond + self.precond_lr * h

    def direction(self, grad: Array) -> Array:
        return apply(np.linalg.inv(self.precond), grad)


def woodbury(inverse: Array, g: Array, *, precond_lr: float, gamma: float, batch: float) -> Array:
    """((1-β₂γ)S + β₂ B g gᵀ)⁻¹ from S⁻¹: c⁻¹S⁻¹ - c⁻² b v vᵀ / (1 + c⁻¹ b gᵀv), v = S⁻¹g.

    c = 1 - β₂γ, b = β₂B. The undamped method 3 without an inversion.
    """
    c, b = 1 - precond_lr * gamma, precond_lr * batch
    v = inverse @ g
    return np.asarray(inverse / c - (b / c**2) * np.outer(v, v) / (1 + b * (g @ v) / c))


class IFCovarianceOracle(CurvatureOracle):
    """P <- (1+β₂γ)P - β₂PHP + β₂²/2·(PHPHP - 2γPHP + γ²P), P = S⁻¹; U = Pg; P₀ = I (`initial`).

    H includes λI. Any symmetric H.
    """

    def __init__(
        self,
        param: Array,
        *,
        precond_lr: float,
        gamma: float = 1.0,
        damping: float = 0.0,
        batch_size: float = 1.0,
        initial: Array | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            param,
            precond_lr=precond_lr,
            gamma=gamma,
            damping=damping,
            batch_size=batch_size,
            **common,
        )
        self.inverse = np.eye(self.param.size) if initial is None else np.array(initial)

    def refresh(self, grad: Array, curvature: Array | None) -> None:
        b, c, p, h = self.precond_lr, self.gamma, self.inverse, self.damped(grad, curvature)
        w = p @ h @ p @ h @ p - 2 * c * (p @ h @ p) + c**2 * p
        self.inverse = (1 + b * c) * p - b * (p @ h @ p) + b**2 / 2 * w

    def direction(self, grad: Array) -> Array:
        return apply(self.inverse, grad)


class IFFactorOracle(CurvatureOracle):
    """S⁻¹ = AAᵀ; h = ½(AᵀHA - γI); m <- α₂m + (1-α₂)h; A <- A exp(-β₂m); U = AAᵀg; A₀ = I.

    With α₂ = 0 this is A <- A exp(-β₂/2·(AᵀHA - γI)), the default. `exponential="truncated"` with
    `factor_norm="frobenius"` is A <- A(I - β₂m/max(1, ‖m‖_F)), the one-factor case of method 7.
    """

    def __init__(
        self,
        param: Array,
        *,
        precond_lr: float,
        gamma: float = 1.0,
        damping: float = 0.0,
        batch_size: float = 1.0,
        riemannian_momentum: float = 0.0,  # α₂
        factor_norm: FactorNorm = None,
        exponential: Exponential = "exact",
        initial: Array | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            param,
            precond_lr=precond_lr,
            gamma=gamma,
            damping=damping,
            batch_size=batch_size,
            **common,
        )
        self.riemannian_momentum = riemannian_momentum
        self.factor_norm: FactorNorm = factor_norm
        self.exponential: Exponential = exponential
        self.factor = np.eye(self.param.size) if initial is None else np.array(initial)
        self.tangent = np.zeros_like(self.factor)  # m

    def refresh(self, grad: Array, curvature: Array | None) -> None:
        a, alpha2 = self.factor, self.riemannian_momentum
        n = a.T @ self.damped(grad, curvature) @ a - self.gamma * np.eye(len(a))
        self.tangent = alpha2 * self.tangent + (1 - alpha2) * n / 2
        self.factor = retract(
            a,
            self.tangent,
            precond_lr=self.precond_lr,
            norm=self.factor_norm,
            exponential=self.exponential,
        )

    def direction(self, grad: Array) -> Array:
        return apply(self.factor @ self.factor.T, grad)
