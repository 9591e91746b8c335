"""A given curvature in the frame of dense factors: KᵀUK on the matrix units.

KᵀUK needs the precision of fp32. With K near U^(-½), KᵀUK is near I. An error δ of U becomes KᵀδK,
which is up to κ‖δ‖/‖U‖ for a U with condition number κ. In bf16, δ is up to 2⁻⁸ of U: from κ = 10⁴
on, KᵀUK has negative eigenvalues in practice, and K grows without limit along them. The rounding of
K itself does no harm, as KᵀUK is positive definite for every K.

K is in bf16 already. The other operand, U and then UK, is in fp32. Every number of U is the sum of
three bf16 numbers with 8 of its 24 bits each: the nearest one, the one nearest to the remainder,
and the rest. Products of bf16 numbers are exact in fp32, in which matrix units add them up. So UK
is nearly as accurate as a product in fp32; the sums are truncated instead of rounded. Two summands
would leave an error of up to 2⁻¹⁷ of U, which only suffices up to κ = 10⁵. For UK two summands are
enough: UK is near U^½, so that their error grows with √κ. Where 2⁻¹⁷√κ is more than a thousandth,
it is less than 2⁻²⁴κ, the error of fp32. The five products run on matrix units, more than ten times
faster than products in fp32 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature, OuterProducts
from rootfree.curvature.stacking import MixedCurvature
from rootfree.kernels.axis_products import padded, room, tiling, without
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.structures import Structure
from rootfree.structures.base import divided

_BLOCK = 4096


@dataclass(frozen=True)
class MatrixUnits(Structure):
    """All d×d matrices, padded; factors are in bf16, and matrix units compute KᵀUK."""

    kind = "dense on matrix units"

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return (room(self.d), room(self.d))

    def unpack(self, K: Tensor) -> Tensor:
        return without(K, (self.d, self.d))

    def pack(self, M: Tensor) -> Tensor:
        return padded(M, self.packed_shape)

    def add_to_diagonal_(self, M: Tensor, value: float) -> Tensor:
        self.unpack(M).diagonal(dim1=-2, dim2=-1).add_(value)
        return M

    def project_congruence(self, K: Tensor, U: Tensor, unit: Tensor | None = None) -> Tensor:
        """``Kᵀ U K`` in fp32."""
        size = room(self.d)
        if U.dim() == 2:
            KU = (padded(divided(U, unit), (size,)).unsqueeze(-1) * K).mT
            summands = split(KU.contiguous(), size, count=2)
        else:
            summands = product(split(U.contiguous(), size, count=3, unit=unit), K)
        return product(summands, K, last=True)


def in_frame(
    H: BlockCurvature, Ks: Sequence[Tensor], sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """For every axis: the partial trace of KᵀHK, padded like Ks, and its weight (b,) in fp32.

    Ks are in bf16; `sizes` are without padding.
    """
    seen = H.for_operands(torch.bfloat16, 1.0).in_frame(Ks, [MatrixUnits(d) for d in sizes])
    return [(gram.contiguous(), weight.float().contiguous()) for gram, weight in seen]


def slow_(products: Tensor, H: BlockCurvature, by: float) -> None:
    """K h <- by·K h in blocks whose curvature is that of a single gradient.  Changes products."""
    for rows, each in H.members if isinstance(H, MixedCurvature) else ():
        if isinstance(each, OuterProducts) and not each.given:
            for part in rows:
                products[part] *= by


def split(X: Tensor, size: int, *, count: int, unit: Tensor | None = None) -> Tensor:
    """X (b, d, d) over unit (b,), as a sum of `count` bf16 matrices: (b, count, size, size)."""
    b, d = X.shape[:2]
    summands = torch.empty(b, count, size, size, dtype=torch.bfloat16, device=X.device)
    chunks = -(-size * size // _BLOCK)
    launch(
        triton_kernels().products.split_kernel, b * chunks,
        X, summands, X if unit is None else unit, d, size, chunks,
        DIVIDE=unit is not None, COUNT=count, PADDED=size != d, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return summands


def product(summands: Tensor, K: Tensor, *, last: bool = False) -> Tensor:
    """(X K)ᵀ of X = Σ summands (b, count, d, d) and K in bf16, as a sum of two: (b, 2, d, d).

    `last`: the result is KᵀUK, which is symmetric, as (b, d, d) in fp32.
    """
    b, count, d = summands.shape[:3]
    tile, tiles = tiling(d, d)
    if last:
        out = torch.empty(b, d, d, device=K.device)
    else:
        tiles = (-(-d // tile["TILE"])) ** 2
        out = torch.empty(b, 2, d, d, dtype=torch.bfloat16, device=K.device)
    launch(
        triton_kernels().products.sum_product_kernel, b * tiles, summands, K, out, d, tiles,
        COUNT=count, LAST=last, **tile,
    )  # fmt: skip
    return out
