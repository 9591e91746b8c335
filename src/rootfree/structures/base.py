"""The laws of a structured factor: one packed tensor, and a stateless object that reads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rootfree.structures.norms import schatten8
from rootfree.structures.precision import sum_of_squares, wide_dtype


@dataclass(frozen=True)
class Structure(ABC):
    """A set 𝔞 of d×d matrices, closed under sums, multiples and products, that holds the identity.

    Shapes, here and in every subclass: b blocks, d the axis, r columns.
      packed K, M: (b, *packed_shape)      dense: (b, d, d)      X: (b, d, r)

    Laws, with ⟦K⟧ = unpack(K):
      pack(⟦K⟧) = K                         apply(K, X) = ⟦K⟧X,  apply_transposed(K, X) = ⟦K⟧ᵀX
      apply_symmetric(K, X) = ⟦K⟧⟦K⟧ᵀX
      ⟦product(K, M)⟧ = ⟦K⟧⟦M⟧              product(identity, K) = product(K, identity) = K
      project_gram(X) = project(XXᵀ)        project_factor_gram(K) = project(⟦K⟧ᵀ⟦K⟧)
      project_congruence(K, U) = project(⟦K⟧ᵀU⟦K⟧), U (b, d, d) symmetric or (b, d) its diagonal
      squared_norm(K) = ‖⟦K⟧‖²              spectral_bound(M) >= ‖⟦M⟧‖₂
      trace(M) = tr⟦M⟧                      squared_rows(K)[i] = Σⱼ ⟦K⟧[i, j]²
      add_to_diagonal_(M, v): ⟦M⟧ <- ⟦M⟧ + v·I

    The projection. A step K exp(-βm), m ∈ 𝔞, changes KKᵀ to first order by -2β·K sym(m) Kᵀ, with
    sym(m) = (m + mᵀ)/2. Π(M) of a symmetric M is the m ∈ 𝔞 whose sym(m) is nearest to M:
      ⟨M - sym(Π(M)), sym(n)⟩ = 0 for all n ∈ 𝔞          (an entry without its mirror counts twice)
      ⟨Π(M), n⟩ = 0 for all n ∈ 𝔞 with nᵀ = -n           (no rotation, which leaves KKᵀ alone)
    These two lines fix Π: dense Π(M) = M, triangular Π(M) = tril(M) + its strictly lower part.
    The identity is in 𝔞, so trace(Π(M)) = tr M.

    Precision: the tensors of one call share a dtype, and results have it. Halves are reduced in
    fp32, and squared_norm of halves is fp32. Nothing waits for the device. Memory: pack, unpack and
    project may return their argument or a view of it; all else is new, but for the name with _.
    """

    d: int

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        if self.d < 1:
            raise ValueError(f"d must be at least 1, got {self.d}")

    @property
    def name(self) -> str:
        """Canonical text: ``make_structure(s.name, s.d) == s``."""
        return self.kind

    @property
    @abstractmethod
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of one packed factor, without b."""

    @abstractmethod
    def unpack(self, K: Tensor) -> Tensor:
        """Packed K -> dense (b, d, d)."""

    @abstractmethod
    def pack(self, M: Tensor) -> Tensor:
        """Dense M (b, d, d) that lies in the structure -> packed; other entries are not read."""

    @abstractmethod
    def project(self, M: Tensor) -> Tensor:
        """Π(M), packed, of a dense symmetric M (b, d, d)."""

    @abstractmethod
    def add_to_diagonal_(self, M: Tensor, value: float) -> Tensor:
        """``M <- M + value·I`` on packed M, in place; returns M."""

    def identity(self, b: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Packed identity, b times."""
        zero = torch.zeros(b, *self.packed_shape, dtype=dtype, device=device)
        return self.add_to_diagonal_(zero, 1.0)

    def apply(self, K: Tensor, X: Tensor) -> Tensor:
        """``K X``, (b, d, r)."""
        return self.unpack(K) @ X

    def apply_transposed(self, K: Tensor, X: Tensor) -> Tensor:
        """``Kᵀ X``, (b, d, r)."""
        return self.unpack(K).mT @ X

    def apply_symmetric(self, K: Tensor, X: Tensor) -> Tensor:
        """``K Kᵀ X``, (b, d, r)."""
        return self.apply(K, self.apply_transposed(K, X))

    def product(self, K: Tensor, M: Tensor) -> Tensor:
        """``K M``, packed, of two packed matrices."""
        return self.pack(self.unpack(K) @ self.unpack(M))

    def project_gram(self, X: Tensor) -> Tensor:
        """``Π(X Xᵀ)``, packed."""
        return self.project(X @ X.mT)

    def project_factor_gram(self, K: Tensor) -> Tensor:
        """``Π(Kᵀ K)``, packed."""
        return self.project_gram(self.unpack(K).mT)

    def project_congruence(self, K: Tensor, U: Tensor) -> Tensor:
        """``Π(Kᵀ U K)``, packed, of a symmetric U (b, d, d), or (b, d) for a diagonal one."""
        dense = self.unpack(K)
        return self.project(dense.mT @ (U.unsqueeze(-1) * dense if U.dim() == 2 else U @ dense))

    def spectral_bound(self, M: Tensor, *, dtype: torch.dtype) -> Tensor:
        """At least ``‖M‖₂``, and little more: the Schatten-8 norm unless said otherwise, (b,).

        The products run in `dtype`.
        """
        return schatten8(self.unpack(M), dtype=dtype)

    def squared_norm(self, K: Tensor) -> Tensor:
        """``‖K‖² = tr KᵀK`` of the dense matrix, (b,)."""
        return sum_of_squares(K.flatten(1), dim=1)  # right where every packed entry occurs once

    def squared_rows(self, K: Tensor) -> Tensor:
        """The squared norm of each row of the dense matrix, diag(KKᵀ), (b, d)."""
        return sum_of_squares(self.unpack(K), dim=2)

    def trace(self, M: Tensor) -> Tensor:
        """``tr M`` of the dense matrix, (b,)."""
        diagonal = self.unpack(M).diagonal(dim1=1, dim2=2)
        return diagonal.sum(1, dtype=wide_dtype(M.dtype))


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
        """Canonical text, with the size: block_diagonal:32."""
        return f"{self.kind}:{self.k}"


def frobenius_norm(structure: Structure, M: Tensor) -> Tensor:
    """``‖M‖_F`` of a packed M, (b,), also where its square leaves the range of the dtype."""
    largest = M.abs().flatten(1).amax(1).clamp(min=1.0)
    return largest * structure.squared_norm(M / largest.view(-1, *[1] * (M.dim() - 1))).sqrt()
