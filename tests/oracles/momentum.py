"""What every method but RF-AdamW shares: schedule, momentum, decay, step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypedDict

import numpy as np

from oracles.kronecker import Array


def rms(tensor: Array) -> float:
    """√(mean of the squares)."""
    return float(np.sqrt(np.mean(tensor**2)))


class Common(TypedDict, total=False):
    """Hyper-parameters of `MomentumOracle`, for the signatures of the methods."""

    lr: float  # β₁
    momentum: float  # α₁
    weight_decay: float  # κ
    nesterov: bool
    decoupled_weight_decay: bool
    update_every: int | Callable[[int], bool]  # T
    update_rms: float | None
    max_update_rms: float | None


class MomentumOracle(ABC):
    """One parameter under one method: refresh (at steps 0, T, 2T, ...), direction, momentum, step.

    The paper's step:              M <- α₁M + U + κW;   step = M;   W <- W - β₁·step
    With Nesterov's momentum:      M as before;         step = U + κW + α₁M
    With decoupled decay:          κW is in neither;    W <- (1 - β₁κ)W - β₁·step
    With update_rms r, which always decouples:          W <- (1 - β₁κ)W - β₁ r step / rms(step)
    With max_update_rms c, before all of it:            U <- U min(1, c / rms(U))

    U = 0 and a zero step are left as they are (no division by a zero RMS). `lr`, `batch_size` and
    the other numbers are plain attributes: assign between steps to follow a schedule.
    """

    def __init__(
        self,
        param: Array,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        update_every: int | Callable[[int], bool] = 1,
        update_rms: float | None = None,
        max_update_rms: float | None = None,
    ) -> None:
        self.param = np.array(param, dtype=np.float64)
        self.buffer = np.zeros_like(self.param)  # M
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self.decoupled_weight_decay = decoupled_weight_decay
        self.update_every = update_every
        self.update_rms = update_rms
        self.max_update_rms = max_update_rms
        self.steps = 0

    def step(self, grad: Array, curvature: Array | None = None) -> Array:
        """One step; `curvature` (dense, D x D, undamped) replaces B g gᵀ. Returns the parameter."""
        grad = np.asarray(grad, dtype=np.float64)
        if self.is_refresh(self.steps):
            self.refresh(grad, curvature)
        u = self.direction(grad)
        if self.max_update_rms is not None and rms(u) > self.max_update_rms:
            u = u * (self.max_update_rms / rms(u))
        decoupled = self.decoupled_weight_decay or self.update_rms is not None
        if not decoupled:
            u = u + self.weight_decay * self.param
        self.buffer = self.momentum * self.buffer + u
        step = u + self.momentum * self.buffer if self.nesterov else self.buffer
        if self.update_rms is not None and rms(step) > 0:
            step = step * (self.update_rms / rms(step))
        if decoupled:
            self.param = (1 - self.lr * self.weight_decay) * self.param
        self.param = self.param - self.lr * step
        self.param = np.asarray(self.param)  # arithmetic turns arrays without axes into scalars
        self.buffer = np.asarray(self.buffer)
        self.steps += 1
        return self.param

    def is_refresh(self, step: int) -> bool:
        """Whether the preconditioner is refreshed at this step (counted from 0)."""
        if callable(self.update_every):
            return bool(self.update_every(step))
        return step % self.update_every == 0

    @abstractmethod
    def refresh(self, grad: Array, curvature: Array | None) -> None:
        """Update the preconditioner from the gradient, or from the curvature when it is given."""

    @abstractmethod
    def direction(self, grad: Array) -> Array:
        """U, shaped like the parameter."""
