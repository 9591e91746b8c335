"""Inverse-free whitening: the root kept, by matrix products alone.

⊗Pₙ follows (E[ggᵀ])^{-½}, the direction of Shampoo with the root. Pₙ = CₙCₙᵀ is kept by its factor:
congruence Pₙ <- (I - X)Pₙ(I - X) is Cₙ <- (I - X)Cₙ, and no rounding can make Pₙ indefinite.
Rounding of Pₙ itself has no such guarantee, and a direction with the wrong sign would grow.

Layout: Cs[n], Ps[n] and Es[n] packed, (b, *packed_shape), with structures[n]; G a stack of blocks
(b, d_1..d_N).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature
from rootfree.rules import if_shampoo
from rootfree.rules.if_shampoo import Norm
from rootfree.structures import Structure, per_block

# log₂; h of this size can still be squared and summed in fp32.
LARGEST_DAMPING = 40
# The rate of v, the size of the gradient that damping is relative to, is this times β₂. The slower
# v is, the sooner steps become small where the loss does.
SLOWLY = 0.01
# A gradient counts in v as at most this times v: v forgets slowly, and damping by an outlier would
# hold steps back all the while.
MOST = 1e3
# A fast start: at step t β₂ is max(β₂, FOLLOWS/(t + FOLLOWS)). For RAMP steps smaller steps than
# later are scaled up to r.
FOLLOWS, RAMP = 50, 200


def start_rate(t: int, beta2: float) -> float:
    """max(β₂, 50/(t + 50)) at step t (from 0).

    Gradients become smaller by one or two orders of magnitude in the first steps, and their
    directions change. Factors that lag behind are of little use when the learning rate is largest.
    """
    return max(beta2, FOLLOWS / (t + FOLLOWS)) if beta2 > 0 else 0.0


def end_of_start(beta2: float) -> int:
    """The first step that has β₂ and the whole limit."""
    return max(RAMP, math.ceil(FOLLOWS / beta2 - FOLLOWS) if beta2 > 0 else 0)


def share_of_least(t: int) -> float:
    """min(1, t/200) at step t (from 0): a step is scaled up to r beyond this share of white noise.

    While P lags behind, U is small because P is, not because the parameter comes to rest. Steps
    proportional to the gradient are those of SGD: when gradients grow, so do they, and the loss.
    """
    return min(1.0, t / RAMP)


def errors(
    Ps: Sequence[Tensor],
    scales: Sequence[Tensor | float],
    H: BlockCurvature,
    structures: Sequence[Structure],
    *,
    lam: Tensor,
    wide: torch.dtype,
) -> list[Tensor]:
    """Eₙ = U₍ₙ₎U₍ₙ₎ᵀ/D₋ₙ + λ ∏_{j≠n} tr(Pⱼ²)/dⱼ · Pₙ² - I: what P lacks to whiten, in `wide`.

    U is G with Pₙ on every axis; λ (b,). It is twice the tangent vector of inverse-free Shampoo,
    with P in the place of K and γ = 1.
    """
    means = if_shampoo.mean_squares(Ps, scales, structures, wide=wide)
    hs = if_shampoo.tangents(Ps, scales, means, H, structures, lam=lam, gamma=1.0)
    return [2 * h for h in hs]


def limited(lam: Tensor, means: Sequence[Tensor], structures: Sequence[Structure]) -> Tensor:
    """λ (b,), made smaller where the damping of a block would leave the range of the precision.

    Gradients that suddenly are larger by many orders of magnitude raise λ before P could follow.
    means[n] is tr(CₙᵀCₙ)/dₙ, so that tr(Pₙ²)/dₙ <= dₙ·means[n]². E is normalised: that its damping
    has a size at all is enough.
    """
    bound = lam.log2()
    for mean, structure in zip(means, structures, strict=True):
        bound = bound + math.log2(structure.d) + 2 * mean.log2()
    return lam * torch.exp2((LARGEST_DAMPING - bound).clamp(max=0.0))


def move_factors_(
    Cs: Sequence[Tensor],
    Es: Sequence[Tensor],
    structures: Sequence[Structure],
    *,
    beta2: float,
    norm: Norm,
    dtype: torch.dtype,
) -> None:
    """Cₙ <- (I - β₂/2·Eₙ/max(1, ‖Eₙ‖))Cₙ, the product in `dtype`.  Changes Cs."""
    for n, (C, E, structure) in enumerate(zip(Cs, Es, structures, strict=True)):
        step = beta2 / 2 / norm(n, E).clamp(min=1.0)
        scaled = (E * per_block(step, E)).to(dtype)
        C.sub_(structure.product(scaled, C.to(dtype)))
