"""Structures with a size, and the first of them: block-diagonal matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rootfree.structures.base import (
    Structure,
    dense_inverse,
    divided,
    schatten8,
    sum_of_squares,
    wide_dtype,
)


@dataclass(frozen=True)
class SizedStructure(Structure):
    """A structure with a size parameter k; k > d is the same structure as k = d."""

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError(f"k of {self.kind} must be at least 1, got {self.k}")
        object.__setattr__(self, "k", min(self.k, self.d))

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.k}"


@dataclass(frozen=True)
class BlockDiagonal(SizedStructure):
    """Packed (n, k, k), n = ceil(d / k): the diagonal blocks. Π(M) = the blocks of M.

    Where k does not divide d, the last block is smaller and fills its top left corner; the rest is
    zero and stays zero under every operation, so that norms and products need no mask.
    """

    kind = "block_diagonal"

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return (self._n, self.k, self.k)

    @property
    def row_length(self) -> int:
        return self.k

    @property
    def _n(self) -> int:
        return -(-self.d // self.k)

    @property
    def _padding(self) -> int:
        return self._n * self.k - self.d

    def unpack(self, K: Tensor) -> Tensor:
        n, k = self._n, self.k
        M = K.new_zeros(K.shape[0], n, k, n, k)
        M.diagonal(dim1=1, dim2=3).copy_(K.permute(0, 2, 3, 1))  # (b, k, k, n)
        return M.view(-1, n * k, n * k)[:, : self.d, : self.d]

    def pack(self, M: Tensor) -> Tensor:
        n, k = self._n, self.k
        blocks = pad(M, (0, self._padding, 0, self._padding)).view(-1, n, k, n, k)
        return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous()

    def add_to_diagonal_(self, M: Tensor, value: float) -> Tensor:
        diagonals = M.diagonal(dim1=-2, dim2=-1)  # (b, n, k)
        diagonals[:, :-1].add_(value)
        diagonals[:, -1, : self.k - self._padding].add_(value)  # the padding stays zero
        return M

    def apply(self, K: Tensor, X: Tensor) -> Tensor:
        return self._join(K @ self._split(X))

    def apply_transposed(self, K: Tensor, X: Tensor) -> Tensor:
        return self._join(K.mT @ self._split(X))

    def inverse(self, K: Tensor) -> Tensor:
        # ones in the padding, to have an inverse, which is ones again
        padding = K.new_zeros(self._n, self.k)
        padding[-1, self.k - self._padding :].fill_(1)
        ones = padding.diag_embed()
        return dense_inverse(K + ones) - ones

    def symmetric_product(self, K: Tensor) -> Tensor:
        return K @ K.mT

    def product(self, K: Tensor, M: Tensor) -> Tensor:
        return K @ M

    def project_gram(self, X: Tensor) -> Tensor:
        rows = self._split(X)
        return rows @ rows.mT

    def project_factor_gram(self, K: Tensor) -> Tensor:
        return K.mT @ K

    def project_congruence(self, K: Tensor, U: Tensor, unit: Tensor | None = None) -> Tensor:
        U, K = divided(U, unit), K.to(U.dtype)
        if U.dim() == 2:
            return K.mT @ (self._split(U.unsqueeze(-1)) * K)
        return K.mT @ (self.pack(U) @ K)  # the other blocks of U do not meet those of K

    def squared_rows(self, K: Tensor) -> Tensor:
        return sum_of_squares(K, dim=3).flatten(1)[:, : self.d]

    def trace(self, M: Tensor) -> Tensor:
        # the padding is zero
        return M.diagonal(dim1=2, dim2=3).sum((1, 2), dtype=wide_dtype(M.dtype))

    def spectral_bound(self, M: Tensor, *, dtype: torch.dtype) -> Tensor:
        return schatten8(M, dtype=dtype).amax(1)

    def _split(self, X: Tensor) -> Tensor:
        """(b, d, r) -> (b, n, k, r), zero rows at the end."""
        if self._padding:  # pad copies even where it adds nothing
            X = pad(X, (0, 0, 0, self._padding))
        return X.reshape(X.shape[0], self._n, self.k, X.shape[2])

    def _join(self, rows: Tensor) -> Tensor:
        """(b, n, k, r) -> (b, d, r)."""
        return rows.flatten(1, 2)[:, : self.d]
