"""Lower and upper triangular matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rootfree.structures.base import Structure


@dataclass(frozen=True)
class _Triangular(Structure):
    """Packed (d(d+1)/2,): the triangle, row by row; half the memory of a dense factor.

    Products unpack, since a dense GEMM beats a gather inside one. Π(M): the triangle of M, entries
    off the diagonal twice.
    """

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return (self.d * (self.d + 1) // 2,)

    def unpack(self, K: Tensor) -> Tensor:
        places, _ = _entries(self.kind, self.d, K.device)
        flat = K.new_zeros(K.shape[0], self.d * self.d)
        return flat.index_copy_(1, places, K).view(-1, self.d, self.d)

    def pack(self, M: Tensor) -> Tensor:
        places, _ = _entries(self.kind, self.d, M.device)
        return M.flatten(1).index_select(1, places)

    def project(self, M: Tensor) -> Tensor:
        _, diagonal = _entries(self.kind, self.d, M.device)
        doubled = self.pack(M).mul_(2)
        return doubled.index_copy_(1, diagonal, M.diagonal(dim1=-2, dim2=-1))

    def add_to_diagonal_(self, M: Tensor, value: float) -> Tensor:
        _, diagonal = _entries(self.kind, self.d, M.device)
        return M.index_copy_(1, diagonal, M.index_select(1, diagonal).add_(value))


@dataclass(frozen=True)
class LowerTriangular(_Triangular):
    """Lower triangular matrices, packed row by row: (0,0), (1,0), (1,1), (2,0), ..."""

    kind = "lower_triangular"


@dataclass(frozen=True)
class UpperTriangular(_Triangular):
    """Upper triangular matrices, packed row by row: (0,0), (0,1), ..., (1,1), (1,2), ..."""

    kind = "upper_triangular"


# The index tensors are cached, not kept in the structure: they belong to (d, device), all factors
# of one size share them, and a stateless structure can be compared, hashed and pickled.
@lru_cache(maxsize=128)
def _entries(kind: str, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of the packed entries in the flat dense matrix, and of the diagonal in packed."""
    i = torch.arange(d, device=device)
    if kind == "lower_triangular":
        rows, columns = torch.tril_indices(d, d, device=device)
        diagonal = i * (i + 3) // 2  # row i starts at i(i+1)/2, its diagonal is i later
    else:
        rows, columns = torch.triu_indices(d, d, device=device)
        diagonal = i * d - i * (i - 1) // 2  # the rows before i hold d, d-1, ..., d-i+1
    return rows * d + columns, diagonal
