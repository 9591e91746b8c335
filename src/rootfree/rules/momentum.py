"""The tail of a step: from directions to parameters.

Layout: lists with one entry a parameter: `ps` parameters, `ms` momentum, `us` directions (freshly
made, so they may be overwritten).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = list[Tensor]


class Tail(NamedTuple):
    """The hyper-parameters of the tail."""

    lr: float | Tensor  # β₁
    alpha1: float
    kappa: float
    nesterov: bool
    decoupled: bool
    rms: float | None = None  # r
    cap: float | None = None
    clip: float | None = None  # c
    least: float = 1e-30  # a smaller step is not scaled up to r

    @property
    def coupled(self) -> float:
        """κ where it enters the momentum."""
        # A step of a given size would be rescaled with the decay in it.
        return 0.0 if self.decoupled or self.rms is not None else self.kappa


def root_mean_squares(tensors: Tensors) -> Tensor:
    """The root mean square of each tensor, in float64."""
    # The sizes go in as numbers, not as a tensor: nothing is copied to the device.
    roots = [1 / math.sqrt(t.numel()) for t in tensors]
    norms = torch._foreach_norm(tensors, dtype=torch.float64)
    return torch.stack(torch._foreach_mul(norms, roots))


def descend_(
    ps: Tensors,
    ms: Tensors,
    us: Tensors,
    tail: Tail,
    *,
    over: Tensors | None = None,
    rms: Callable[[Tensors], Tensor] = root_mean_squares,
) -> None:
    """From directions (u/over if that is given) to parameters.  Changes ps, ms, us; no ms: α₁ = 0.

    u <- u·min(1, cap/rms(u));  each element at most c
    m <- α₁ m + u (+ κ p)                     the step is m; with Nesterov u (+ κ p) + α₁ m
    p <- (1 - β₁κ) p - β₁·step·(r/rms(step))  κ stands here if it is decoupled, else above
                                              a step with a smaller RMS than `least` becomes smaller
    `rms`: of the parameters that the tensors are, or are parts of.
    """
    if over is not None and (not ms or tail.nesterov or tail.clip is not None):
        us, over = list(torch._foreach_div(us, over)), None
    lr, coupled, steps = tail.lr, tail.coupled, us
    if tail.cap is not None:
        cap_rms_(us, cap=tail.cap, rms=rms)
    if tail.clip is not None:
        clip_(us, c=tail.clip)
    if ms:
        torch._foreach_mul_(ms, tail.alpha1)
        torch._foreach_add_(ms, us) if over is None else torch._foreach_addcdiv_(ms, us, over)
        if coupled != 0:
            torch._foreach_add_(ms, ps, alpha=coupled)
        if tail.nesterov:
            torch._foreach_add_(us, ms, alpha=tail.alpha1)
        else:
            steps = ms
    if coupled != 0 and steps is us:
        torch._foreach_add_(us, ps, alpha=coupled)
    if coupled == 0:
        decay_(ps, lr=lr, kappa=tail.kappa)
    if tail.rms is not None:
        scales = tail.rms / rms(steps).clamp(min=tail.least)
        steps = list(torch._foreach_mul(steps, list(scales.to(steps[0].dtype).unbind())))
    subtract_(ps, steps, lr=lr)


def subtract_(ps: Tensors, us: Tensors, *, lr: float | Tensor) -> None:
    """p <- p - β₁ u.  Changes ps."""
    if isinstance(lr, Tensor):
        # A tensor step size stays on its device: scaling by it needs no value on the host.
        torch._foreach_sub_(ps, torch._foreach_mul(us, lr.reshape(())))
    else:
        torch._foreach_add_(ps, us, alpha=-lr)


def decay_(ps: Tensors, *, lr: float | Tensor, kappa: float) -> None:
    """p <- (1 - β₁κ) p.  Changes ps."""
    if kappa != 0:
        factor = 1 - lr * kappa
        torch._foreach_mul_(ps, factor.reshape(()) if isinstance(factor, Tensor) else factor)


def clip_(us: Tensors, *, c: float) -> None:
    """u <- max(-c, min(u, c)), element by element.  Changes us."""
    torch._foreach_clamp_max_(us, c)
    torch._foreach_clamp_min_(us, -c)


def cap_rms_(
    us: Tensors, *, cap: float, rms: Callable[[Tensors], Tensor] = root_mean_squares
) -> None:
    """u <- u·min(1, cap/rms(u)).  Changes us.

    Directions may have any size: an infinite entry counts as the largest number, and squares are
    summed in float64.
    """
    largest = 1e150 if us[0].dtype == torch.float64 else torch.finfo(us[0].dtype).max
    for u in us:
        u.clamp_(-largest, largest)
    scales = (cap / rms(us)).clamp(max=1.0)
    torch._foreach_mul_(us, list(scales.to(us[0].dtype).unbind()))
