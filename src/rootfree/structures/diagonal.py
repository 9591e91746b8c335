"""Diagonal matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rootfree.structures.base import Structure, divided, sum_of_squares, wide_dtype


@dataclass(frozen=True)
class Diagonal(Structure):
    """Packed (d,): the diagonal. Π(M) = diag(M). Nothing but `unpack` costs more than O(d r)."""

    kind = "diagonal"

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return (self.d,)

    @property
    def row_length(self) -> int:
        return 1

    def unpack(self, K: Tensor) -> Tensor:
        return K.diag_embed()

    def pack(self, M: Tensor) -> Tensor:
        return M.diagonal(dim1=-2, dim2=-1).contiguous()

    def add_to_diagonal_(self, M: Tensor, value: float) -> Tensor:
        return M.add_(value)

    def apply(self, K: Tensor, X: Tensor) -> Tensor:
        return K.unsqueeze(-1) * X

    def apply_transposed(self, K: Tensor, X: Tensor) -> Tensor:
        return self.apply(K, X)

    def inverse(self, K: Tensor) -> Tensor:
        return K.to(wide_dtype(K.dtype)).reciprocal()

    def symmetric_product(self, K: Tensor) -> Tensor:
        return K.square()

    def product(self, K: Tensor, M: Tensor) -> Tensor:
        return K * M

    def project_gram(self, X: Tensor) -> Tensor:
        return sum_of_squares(X, dim=-1).to(X.dtype)

    def project_factor_gram(self, K: Tensor) -> Tensor:
        return K.square()

    def project_congruence(self, K: Tensor, U: Tensor, unit: Tensor | None = None) -> Tensor:
        u = divided(U if U.dim() == 2 else U.diagonal(dim1=1, dim2=2), unit)
        return K.to(U.dtype).square() * u

    def squared_rows(self, K: Tensor) -> Tensor:
        return K.to(wide_dtype(K.dtype)).square()

    def trace(self, M: Tensor) -> Tensor:
        return M.sum(1, dtype=wide_dtype(M.dtype))

    def spectral_bound(self, M: Tensor, *, dtype: torch.dtype) -> Tensor:
        return M.abs().amax(1)
