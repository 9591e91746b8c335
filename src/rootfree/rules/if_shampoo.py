"""Inverse-free Shampoo: factors of S⁻¹ = ⊗ KₙKₙᵀ moved by matrix products alone.

Layout: Ks[n] the packed factor of axis n, (b, *packed_shape), with structures[n]; ms[n] its tangent
vector, packed alike; G a stack of blocks (b, d_1..d_N). Products run in the dtype of the operands
that are handed in; factors and tangent vectors are accumulated in their own, wider one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature
from rootfree.structures import Structure, multiply_axis, per_block
from rootfree.structures.base import in_float16, products_of_others

Norm = Callable[[int, Tensor], Tensor]


def mean_squares(
    Ks: Sequence[Tensor],
    scales: Sequence[Tensor | float],
    structures: Sequence[Structure],
    *,
    wide: torch.dtype,
) -> list[Tensor]:
    """tr(KₙᵀKₙ)/dₙ of every axis, in `wide`, of factors scales[n]·Ks[n]."""
    return [
        (s.squared_norm(K) / s.d).to(wide) * scale**2
        for K, s, scale in zip(Ks, structures, scales, strict=True)
    ]


def tangents(
    Ks: Sequence[Tensor],
    scales: Sequence[Tensor | float],
    means: Sequence[Tensor],
    H: BlockCurvature,
    structures: Sequence[Structure],
    *,
    lam: float | Tensor,
    gamma: float,
) -> list[Tensor]:
    """hₙ = ½(Π(curvature of axis n) + λ ∏_{j≠n} tr(KⱼᵀKⱼ)/dⱼ · Π(KₙᵀKₙ) - γI), like the means.

    The factors are scales[n]·Ks[n]; H knows about the scales already. `means` are the traces.
    """
    hs, wide = [], means[0].dtype
    others = products_of_others(means, start=means[0].new_ones(()))
    for n, (gram, weight) in enumerate(H.in_frame(Ks, structures)):
        damping = structures[n].project_factor_gram(Ks[n]).to(wide)
        h = per_block(weight.to(wide) / 2, gram) * gram
        h.addcmul_(per_block(lam / 2 * others[n] * scales[n] ** 2, gram), damping)
        hs.append(structures[n].add_to_diagonal_(h, -gamma / 2))
    return hs


def move_factors_(
    Ks: Sequence[Tensor],
    ms: Sequence[Tensor],
    structures: Sequence[Structure],
    *,
    beta2: Sequence[float | Tensor],
    norm: Norm,
    dtype: torch.dtype,
) -> None:
    """Kₙ <- Kₙ(I - β₂ mₙ/max(1, ‖mₙ‖)), β₂ of each axis, the product in `dtype`.  Changes Ks."""
    for n, (K, m, structure) in enumerate(zip(Ks, ms, structures, strict=True)):
        step = beta2[n] * norm(n, m).clamp(min=1.0).reciprocal()
        scaled = (m * per_block(step, m)).to(dtype)
        if dtype == torch.float16:
            unit, size = in_float16(K)
            K.sub_(structure.product(unit, scaled) * per_block(size, K))
        else:
            K.sub_(structure.product(K.to(dtype), scaled))


def exponents(means: Sequence[Tensor]) -> list[Tensor]:
    """Whole eₙ with Σeₙ = 0, for which the factors 2^eₙ·Kₙ have about one scale.

    c·K₁ ⊗ K₂/c is the same preconditioner for every c, and nothing in the updates holds c: it would
    drift until a factor overflows. Powers of two change no bit of what the factors are used for.
    means[n] (b,) is tr(KₙᵀKₙ)/dₙ, the mean square of the singular values.
    """
    tiny, largest = torch.finfo(means[0].dtype).tiny, torch.finfo(means[0].dtype).max
    # log₂ of the root mean square; what is no number is left as it is
    sizes = torch.stack(list(means)).nan_to_num(1.0).clamp(tiny, largest).log2() / 2
    wanted = sizes.mean(0) - sizes
    whole = wanted.round()
    for _ in range(len(means) // 2):  # what rounding left over goes where it matters least
        excess = whole.sum(0).sign()
        farthest = ((whole - wanted) * excess).argmax(0, keepdim=True)
        whole.scatter_add_(0, farthest, -excess.unsqueeze(0))
    return list(whole.unbind())


def balance_(Ks: Sequence[Tensor], means: Sequence[Tensor]) -> None:
    """Kₙ <- 2^eₙ·Kₙ, Σeₙ = 0: one scale for all factors of a block.  Changes Ks.

    `means`: those before the move, which are at hand; a move changes them little.
    """
    if len(Ks) == 1:
        return
    for K, e in zip(Ks, exponents(means), strict=True):
        K.mul_(per_block(torch.exp2(e).to(K.dtype), K))


def rates_by_rank(beta2: float, structures: Sequence[Structure]) -> list[float]:
    """β₂·min(1, D₋ₙ/dₙ) for every axis n; dₙ counts the entries that a row of the factor has.

    A gradient has D₋ₙ columns to say something about the dₙ×dₙ curvature of an axis: a long axis
    beside short ones has to average over more gradients, or its factor would follow their noise.
    """
    elements = math.prod(s.d for s in structures)
    return [beta2 * min(1.0, elements / s.d / s.row_length) for s in structures]


def precondition(G: Tensor, Ks: Sequence[Tensor], structures: Sequence[Structure]) -> Tensor:
    """U = G with KₙKₙᵀ applied on every axis n; in whitening that is Pₙ = CₙCₙᵀ."""
    for n in reversed(range(len(Ks))):  # the first axis last: the result is contiguous
        G = multiply_axis(G, n, partial(structures[n].apply_symmetric, Ks[n]))
    return G
