"""Curvature that was given, in the frame of dense factors: KᵀUK on the matrix units.

KᵀUK needs the precision of fp32. With K near U^(-½), an error δ of U becomes KᵀδK, up to κ‖δ‖/‖U‖
for a U with condition number κ, beside a KᵀUK near I. In bf16 δ is up to 2⁻⁸ of U: from κ = 10⁴ on
KᵀUK has negative eigenvalues in practice, and K grows without limit along them. The rounding of K
itself does no harm, as KᵀUK is positive definite for every K.

K is in bf16 already. The other operand, U and then UK, is in fp32. Every number of U is the sum of
three bf16 numbers (8 bits of 24 each): the nearest one, the nearest to what is left, and the rest.
Products of bf16 numbers are exact in fp32, where they are summed up, so that UK is as good as a
product in fp32. Two summands would leave up to 2⁻¹⁷ of U, which is enough up to κ = 10⁵ only. They
are enough for UK: it is near U^½, so that their error grows with √κ, and where 2⁻¹⁷√κ is more than
a thousandth it is less than 2⁻²⁴κ, the error of fp32. The five products run on matrix units, which
have more than ten times the rate that fp32 has elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature
from rootfree.kernels.axis_products import padded, room, without
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.structures import Dense
from rootfree.structures.base import divided


@dataclass(frozen=True)
class MatrixUnits(Dense):
    """Dense factors in bf16, whose KᵀUK runs on matrix units."""

    def project_congruence(self, K: Tensor, U: Tensor, unit: Tensor | None = None) -> Tensor:
        """``Kᵀ U K`` in fp32."""
        size = room(self.d)
        K = padded(K, (size, size)).contiguous()
        if U.dim() == 2:
            u = padded(divided(U, unit), (size,))
            X = (u.unsqueeze(-1) * K).mT.contiguous()
        else:
            X = split_product(padded(U, (size, size)).contiguous(), K, unit=unit)  # (U K)ᵀ
        return without(split_product(X, K, last=True), (self.d, self.d))


def in_frame(
    H: BlockCurvature, Ks: Sequence[Tensor], sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """For every axis: the partial trace of KᵀHK with padding, and its weight (b,) in fp32.

    Ks are in bf16 and may be padded; `sizes` are those without.
    """
    structures = [MatrixUnits(d) for d in sizes]
    views = [without(K, (d, d)) for K, d in zip(Ks, sizes, strict=True)]
    seen = H.for_operands(torch.bfloat16, 1.0).in_frame(views, structures)
    return [
        (padded(gram, K.shape[1:]).contiguous(), weight.float().contiguous())
        for (gram, weight), K in zip(seen, Ks, strict=True)
    ]


def split_product(
    X: Tensor, K: Tensor, *, unit: Tensor | None = None, last: bool = False
) -> Tensor:
    """(X K)ᵀ in fp32, of X (b, d, d) in fp32 and K in bf16; X is first divided by `unit` (b,).

    `last`: X is (U K)ᵀ, with two summands, and the result KᵀUK is symmetric.
    """
    b, d = K.shape[:2]
    tile = 128 if d >= 128 else 64 if d > 32 else 32
    side = -(-d // tile)
    tiles = side * (side + 1) // 2 if last else side * side
    out = torch.empty_like(X)
    launch(
        triton_kernels().products.split_product_kernel, b * tiles,
        X, K, out, X if unit is None else unit, d, tiles,
        DIVIDE=unit is not None, THREE=not last, SYMMETRIC=last,
        TILE=tile, DEPTH=32, EVEN=d % math.lcm(tile, 32) == 0, EIGHTS=d % 8 == 0,
        num_warps=8 if tile == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out
