"""RF-Shampoo (6): Kronecker factors of S, curvature by the chain rule on the dense H."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import Unpack

from oracles.full_matrix import CurvatureOracle
from oracles.kronecker import Array, apply, kron_all, others_size, partial_trace, squeeze
from oracles.momentum import Common


class RFShampooOracle(CurvatureOracle):
    """S = S_1 x ... x S_N; S_n <- (1-β₂γ)S_n + β₂/D_{-n}·∂⟨H + λI, S⁻¹⟩/∂S_n⁻¹; U = S⁻¹g.

    The derivative is the partial trace, over all axes but n, of (H + λI) times the Kronecker
    product of the S_j⁻¹ with I in place n; for H = B g gᵀ that is
    B·G₍ₙ₎[x_{j≠n}S_j⁻¹]G₍ₙ₎ᵀ + λ∏_{j≠n}tr(S_j⁻¹)·I. All factors are updated from the old ones.

    With `factor_norm` the change of S_n is divided by max(1, ½‖μ‖), μ the generalised eigenvalues
    of the pair (change/β₂, S_n): ‖μ‖₂ for "frobenius", ‖μ‖₄ for "spectral". `init_scale` c: S_n
    starts at I/c²; "gradient": at (tr H/D)^{1/N}·I, from the first H that is not zero.
    """

    def __init__(
        self,
        param: Array,
        *,
        precond_lr: float,
        gamma: float = 1.0,
        damping: float = 0.0,
        batch_size: float = 1.0,
        initial: Sequence[Array] | None = None,
        factor_norm: str | None = None,
        init_scale: float | str = 1.0,
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
        self.factor_norm = factor_norm
        self.waits_for_gradient = init_scale == "gradient"
        scale = 1.0 if isinstance(init_scale, str) else init_scale**-2
        start = [scale * np.eye(d) for d in self.dims] if initial is None else initial
        self.factors = [np.array(s, dtype=np.float64) for s in start]  # S_n

    def factor_curvature(self, n: int, h: Array) -> Array:
        """Σ over the other axes of H (x_{j≠n} S_j⁻¹): what multiplies β₂/D_{-n}."""
        others = [
            np.eye(len(s)) if j == n else np.linalg.inv(s) for j, s in enumerate(self.factors)
        ]
        return partial_trace(h @ kron_all(others), self.dims, n)

    def refresh(self, grad: Array, curvature: Array | None) -> None:
        h = self.damped(grad, curvature)
        size = float(np.trace(h)) / len(h) - self.damping
        if self.waits_for_gradient and size > 0:
            self.factors = [size ** (1 / len(self.dims)) * np.eye(d) for d in self.dims]
            self.waits_for_gradient = False
        new = []
        for n, s in enumerate(self.factors):
            change = self.factor_curvature(n, h) / others_size(self.dims, n) - self.gamma * s
            rate = self.precond_lr
            if self.factor_norm is not None:
                root = np.linalg.inv(np.linalg.cholesky(s))
                mu = np.linalg.eigvalsh(root @ change @ root.T)
                order = {"frobenius": 2, "spectral": 4}[self.factor_norm]
                rate /= max(1.0, float(np.linalg.norm(mu, order)) / 2)
            new.append(s + rate * change)
        self.factors = new

    def direction(self, grad: Array) -> Array:
        inverse = kron_all([np.linalg.inv(s) for s in self.factors])
        return apply(inverse, grad)
