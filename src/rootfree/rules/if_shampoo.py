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
from rootfree.rules import LEAST_DAMPING
from rootfree.structures import Structure, multiply_axis, per_block

Norm = Callable[[int, Tensor], Tensor]


def tangents(
    Ks: Sequence[Tensor],
    scales: Sequence[Tensor | float],
    H: BlockCurvature,
    structures: Sequence[Structure],
    *,
    lam: float,
    gamma: float,
    wide: torch.dtype,
) -> list[Tensor]:
    """hₙ = ½(Π(curvature of axis n) + λ ∏_{j≠n} tr(KⱼᵀKⱼ)/dⱼ · Π(KₙᵀKₙ) - γI), in `wide`.

    The factors are scales[n]·Ks[n]; H knows about the scales already.
    """
    traces = [
        (s.squared_norm(K) / s.d).to(wide) * scale**2
        for K, s, scale in zip(Ks, structures, scales, strict=True)
    ]  # tr(KⱼᵀKⱼ)/dⱼ
    hs = []
    for n, (gram, weight) in enumerate(H.in_frame(Ks, structures)):
        others = math.prod(
            [t for j, t in enumerate(traces) if j != n], start=traces[n].new_ones(())
        )
        damping = structures[n].project_factor_gram(Ks[n]).to(wide)
        h = per_block(weight.to(wide) / 2, gram) * gram
        h.addcmul_(per_block(max(lam, LEAST_DAMPING) / 2 * others * scales[n] ** 2, gram), damping)
        hs.append(structures[n].add_to_diagonal_(h, -gamma / 2))
    return hs


def move_factors_(
    Ks: Sequence[Tensor],
    ms: Sequence[Tensor],
    structures: Sequence[Structure],
    *,
    beta2: float,
    norm: Norm,
    dtype: torch.dtype,
) -> None:
    """Kₙ <- Kₙ(I - β₂ mₙ/max(1, ‖mₙ‖)), the product in `dtype`.  Changes Ks."""
    for n, (K, m, structure) in enumerate(zip(Ks, ms, structures, strict=True)):
        step = beta2 / norm(n, m).clamp(min=1.0)
        scaled = (m * per_block(step, m)).to(dtype)
        if dtype == torch.float16:  # it has not the range of the others
            largest = K.abs().flatten(1).amax(1).clamp(min=torch.finfo(torch.float32).tiny)
            K.sub_(
                structure.product((K / per_block(largest, K)).to(dtype), scaled)
                * per_block(largest, K)
            )
        else:
            K.sub_(structure.product(K.to(dtype), scaled))


def precondition(G: Tensor, Ks: Sequence[Tensor], structures: Sequence[Structure]) -> Tensor:
    """U = G with KₙKₙᵀ applied on every axis n."""
    for n in reversed(range(len(Ks))):  # the first axis last: the result is contiguous
        G = multiply_axis(G, n, partial(structures[n].apply_symmetric, Ks[n]))
    return G
