"""IF-Shampoo (7) with structured factors (8) and the options beyond the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from typing_extensions import Unpack

from oracles.full_matrix import CurvatureOracle, Exponential, FactorNorm, matrix_norm, retract
from oracles.kronecker import Array, apply, kron_all, others_size, partial_trace, squeeze
from oracles.momentum import Common
from oracles.projections import Projection, projection


class IFShampooOracle(CurvatureOracle):
    """S⁻¹ = KKᵀ, K = K_1 x ... x K_N; the dense curvature is pulled into the frame of K.

    Ĥ  = Kᵀ(H + λI)K
    h_n = ½(partial trace of Ĥ over all axes but n / D_{-n} - γI), projected on the structure
    m_n <- α₂m_n + (1-α₂)h_n
    K_n <- K_n(I - β₂m_n/max(1, ‖m_n‖)), or K_n exp(-β₂m_n/max(1, ‖m_n‖)); all from the old K
    U   = KKᵀg with the new K

    `structures`: one name or callable for all axes, or a list with one per (squeezed) axis.
    `init_scale`: K_n starts at that times I; "gradient": at (tr H/D)^{-1/(2N)}·I, which is
    (B mean(G²))^{-1/(2N)}·I without other curvature, from the first H that is not zero.
    `initial` (dense K_n) overrides it.
    `factor_norm` None: no normalisation. `norms` holds ‖m_n‖ of the latest refresh, so that a
    test can tell which branch of the max it saw.
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
        factor_norm: FactorNorm = "frobenius",
        exponential: Exponential = "truncated",
        structures: str | Projection | Sequence[str | Projection] = "dense",
        init_scale: float | Literal["gradient"] = 1.0,
        initial: Sequence[Array] | None = None,
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
        self.dims = squeeze(self.param).shape
        if isinstance(structures, str) or callable(structures):
            structures = [structures] * len(self.dims)
        if len(structures) != len(self.dims):
            raise ValueError(f"{len(structures)} structures for {len(self.dims)} axes")
        self.projections = [projection(s) if isinstance(s, str) else s for s in structures]
        self.riemannian_momentum = riemannian_momentum
        self.factor_norm: FactorNorm = factor_norm
        self.exponential: Exponential = exponential
        self.waits_for_gradient = initial is None and init_scale == "gradient"
        scale = 1.0 if init_scale == "gradient" else init_scale
        start = [scale * np.eye(d) for d in self.dims] if initial is None else initial
        self.factors = [np.array(k, dtype=np.float64) for k in start]  # K_n
        self.tangents = [np.zeros((d, d)) for d in self.dims]  # m_n
        self.norms: list[float] = []

    def step(self, grad: Array, curvature: Array | None = None) -> Array:
        grad = np.asarray(grad, dtype=np.float64)
        trace = self.batch_size * np.sum(grad**2) if curvature is None else np.trace(curvature)
        if self.waits_for_gradient and trace > 0:
            size = float(trace) / grad.size
            self.factors = [size ** (-1 / (2 * len(self.dims))) * np.eye(d) for d in self.dims]
            self.waits_for_gradient = False
        return super().step(grad, curvature)

    def refresh(self, grad: Array, curvature: Array | None) -> None:
        k = kron_all(self.factors)
        pulled = k.T @ self.damped(grad, curvature) @ k  # Ĥ
        alpha2 = self.riemannian_momentum
        new, norms = [], []
        for n, d in enumerate(self.dims):
            trace = partial_trace(pulled, self.dims, n) / others_size(self.dims, n)
            h = self.projections[n]((trace - self.gamma * np.eye(d)) / 2)
            self.tangents[n] = alpha2 * self.tangents[n] + (1 - alpha2) * h
            norms.append(matrix_norm(self.tangents[n], self.factor_norm))
            new.append(
                retract(
                    self.factors[n],
                    self.tangents[n],
                    precond_lr=self.precond_lr,
                    norm=self.factor_norm,
                    exponential=self.exponential,
                )
            )
        self.factors, self.norms = new, norms

    def direction(self, grad: Array) -> Array:
        inverse = kron_all([k @ k.T for k in self.factors])
        return apply(inverse, grad)
