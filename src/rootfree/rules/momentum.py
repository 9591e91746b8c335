"""From a direction to a step: momentum, weight decay, and the size of the update.

Layout: lists with one entry a parameter: `ps` parameters, `ms` momentum, `us` directions (freshly
made, so they may be overwritten).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rootfree.rules.diagonal import decoupled_decay_, descend_

Tensors = list[Tensor]


def heavy_ball_(
    ps: Tensors, ms: Tensors, us: Tensors, *, lr: float | Tensor, alpha1: float, kappa: float
) -> None:
    """m <- α₁ m + u + κ p;  p <- p - β₁ m.  Changes ps, ms, us; no ms means α₁ = 0."""
    ms = _accumulate_(ms, us, alpha1=alpha1)
    if kappa != 0:
        torch._foreach_add_(ms, ps, alpha=kappa)
    descend_(ps, ms, lr=lr)


def rms_matched_heavy_ball_(
    ps: Tensors,
    ms: Tensors,
    us: Tensors,
    *,
    lr: float | Tensor,
    alpha1: float,
    kappa: float,
    r: float,
) -> None:
    """m <- α₁ m + u;  p <- (1 - β₁κ) p - β₁ r m/rms(m).  Changes ps, ms, us."""
    ms = _accumulate_(ms, us, alpha1=alpha1)
    decoupled_decay_(ps, lr=lr, kappa=kappa)
    sizes = _rms(ms)
    # A zero buffer stays zero: no division by a zero RMS.
    scales = torch.where(sizes > 0, r / sizes, 0.0)
    descend_(ps, list(torch._foreach_mul(ms, list(scales.unbind()))), lr=lr)


def cap_rms_(us: Tensors, *, cap: float) -> None:
    """u <- u·min(1, cap/rms(u)).  Changes us."""
    scales = (cap / _rms(us)).clamp(max=1.0)
    torch._foreach_mul_(us, list(scales.unbind()))


def _accumulate_(ms: Tensors, us: Tensors, *, alpha1: float) -> Tensors:
    if not ms:
        return us
    torch._foreach_mul_(ms, alpha1)
    torch._foreach_add_(ms, us)
    return ms


def _rms(tensors: Tensors) -> Tensor:
    # The sizes go in as numbers, not as a tensor: nothing is copied to the device.
    roots = [1 / math.sqrt(t.numel()) for t in tensors]
    return torch.stack(torch._foreach_mul(torch._foreach_norm(tensors), roots))
