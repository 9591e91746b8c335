"""All d×d matrices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rootfree.structures.base import Structure, gram, is_halved


@dataclass(frozen=True)
class Dense(Structure):
    """Packed (d, d): the matrix itself. Π(M) = M."""

    kind = "dense"

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return (self.d, self.d)

    def unpack(self, K: Tensor) -> Tensor:
        return K

    def pack(self, M: Tensor) -> Tensor:
        return M

    def symmetric_product(self, K: Tensor) -> Tensor:
        return gram(K)

    def apply_symmetric(self, K: Tensor, X: Tensor) -> Tensor:
        # Making K Kᵀ costs d³ (two thirds of it where it is halved), a second product with X d²r.
        cost = 0.67 * self.d if is_halved(K) else self.d
        return gram(K) @ X if cost < X.shape[2] else super().apply_symmetric(K, X)

    def add_to_diagonal_(self, M: Tensor, value: float) -> Tensor:
        M.diagonal(dim1=-2, dim2=-1).add_(value)
        return M
