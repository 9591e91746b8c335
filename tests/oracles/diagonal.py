"""Diagonal methods: RF-RMSProp (1), RF-AdaGrad (2), RF-AdamW; one scalar at a time."""

from __future__ import annotations

import numpy as np
from typing_extensions import Unpack

from oracles.kronecker import Array
from oracles.momentum import Common, MomentumOracle


class DiagonalOracle(MomentumOracle):
    """s <- (1 - β₂γ)s + β₂ diag(H), H = B g gᵀ;  U = g / (s + λ);  s₀ = 1 (`initial`)."""

    def __init__(
        self,
        param: Array,
        *,
        gamma: float,  # γ
        precond_lr: float,  # β₂
        damping: float = 0.0,  # λ
        batch_size: float = 1.0,  # B
        initial: float | Array = 1.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(param, **common)
        self.gamma = gamma
        self.precond_lr = precond_lr
        self.damping = damping
        self.batch_size = batch_size
        self.second_moment = np.array(np.broadcast_to(initial, self.param.shape), dtype=np.float64)

    def refresh(self, grad: Array, curvature: Array | None) -> None:
        for i in np.ndindex(*grad.shape):
            k = int(np.ravel_multi_index(i, grad.shape)) if grad.size > 1 else 0
            old = self.second_moment[i]
            new = self.batch_size * grad[i] ** 2 if curvature is None else curvature[k, k]
            self.second_moment[i] = (1 - self.precond_lr * self.gamma) * old + self.precond_lr * new

    def direction(self, grad: Array) -> Array:
        out = np.zeros_like(grad)
        for i in np.ndindex(*grad.shape):
            out[i] = grad[i] / (self.second_moment[i] + self.damping)
        return out


class RFRMSPropOracle(DiagonalOracle):
    """s <- (1-β₂)s + β₂ B g²; m <- α₁m + g/(s+λ) + κμ; μ <- μ - β₁m."""

    def __init__(
        self,
        param: Array,
        *,
        precond_lr: float,
        damping: float = 0.0,
        batch_size: float = 1.0,
        initial: float | Array = 1.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            param,
            gamma=1.0,
            precond_lr=precond_lr,
            damping=damping,
            batch_size=batch_size,
            initial=initial,
            **common,
        )


class RFAdaGradOracle(DiagonalOracle):
    """s <- s + β₂ B g²; the rest as RF-RMSProp."""

    def __init__(
        self,
        param: Array,
        *,
        precond_lr: float,
        damping: float = 0.0,
        batch_size: float = 1.0,
        initial: float | Array = 1.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            param,
            gamma=0.0,
            precond_lr=precond_lr,
            damping=damping,
            batch_size=batch_size,
            initial=initial,
            **common,
        )


class RFAdamWOracle:
    """v <- β₂v + (1-β₂)g²; m <- β₁m + (1-β₁)g; p <- p(1 - lr κ) - lr m/(B v + λ); v₀ = 1/B.

    Nesterov: the step has the m that a second average with the same g would give.
    Here `momentum` is β₁ of AdamW and `precond_lr` is 1 - β₂ of AdamW. No bias correction. With
    v₀ = 1/B the denominator starts at one; `initial` is that start of B v (1.0, or an array).
    """

    def __init__(
        self,
        param: Array,
        *,
        lr: float,
        precond_lr: float,
        momentum: float = 0.9,
        damping: float = 0.0,
        weight_decay: float = 0.0,
        batch_size: float = 1.0,
        nesterov: bool = False,
        initial: float | Array = 1.0,
    ) -> None:
        self.param = np.array(param, dtype=np.float64)
        self.nesterov = nesterov
        self.lr = lr
        self.precond_lr = precond_lr
        self.momentum = momentum
        self.damping = damping
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.first_moment = np.zeros_like(self.param)
        self.second_moment = np.broadcast_to(initial, self.param.shape) / batch_size

    def step(self, grad: Array, curvature: Array | None = None) -> Array:
        """One step; `curvature` (dense, D x D) replaces B g gᵀ. Returns the parameter."""
        beta1, beta2 = self.momentum, 1 - self.precond_lr
        p, m, v = self.param.copy(), self.first_moment.copy(), np.array(self.second_moment)
        for i in np.ndindex(*grad.shape):
            m[i] = beta1 * m[i] + (1 - beta1) * grad[i]
            k = int(np.ravel_multi_index(i, grad.shape)) if grad.size > 1 else 0
            new = grad[i] ** 2 if curvature is None else curvature[k, k] / self.batch_size
            v[i] = beta2 * v[i] + (1 - beta2) * new
            used = beta1 * m[i] + (1 - beta1) * grad[i] if self.nesterov else m[i]
            p[i] = p[i] * (1 - self.lr * self.weight_decay) - self.lr * used / (
                self.batch_size * v[i] + self.damping
            )
        self.param, self.first_moment, self.second_moment = p, m, v
        return self.param
