"""The laws of a structured factor: one packed tensor, and a stateless object that reads it.

By default an operation unpacks the dense matrix; structures override what they can do faster. The
functions at the end work on any stack of blocks (b, d_1, ..., d_N).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

# Rows of a symmetric product that are computed at once: a library is slower on fewer.
_PANEL = 128
# A little more than the rounding of the products, so that a norm from above stays one in bf16.
SLACK = 1 + 2 * torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True)
class Structure(ABC):
    """A set 𝔞 of d×d matrices, closed under sums, multiples and products, that holds the identity.

    Shapes, here and in every subclass: b blocks, d the axis, r columns.
      packed K, M: (b, *packed_shape)      dense: (b, d, d)      X: (b, d, r)

    Laws, with ⟦K⟧ = unpack(K):
      pack(⟦K⟧) = K                         apply(K, X) = ⟦K⟧X,  apply_transposed(K, X) = ⟦K⟧ᵀX
      apply_symmetric(K, X) = ⟦K⟧⟦K⟧ᵀX
      ⟦product(K, M)⟧ = ⟦K⟧⟦M⟧              product(identity, K) = product(K, identity) = K
      ⟦inverse(K)⟧ = ⟦K⟧⁻¹, which is in 𝔞 too
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

    @property
    def row_length(self) -> int:
        """How many entries a row has at most."""
        return self.d

    @abstractmethod
    def unpack(self, K: Tensor) -> Tensor:
        """Packed K -> dense (b, d, d)."""

    @abstractmethod
    def pack(self, M: Tensor) -> Tensor:
        """Dense M (b, d, d) that lies in the structure -> packed; other entries are not read."""

    @abstractmethod
    def add_to_diagonal_(self, M: Tensor, value: float) -> Tensor:
        """``M <- M + value·I`` on packed M, in place; returns M."""

    def project(self, M: Tensor) -> Tensor:
        """Π(M), packed, of a dense symmetric M (b, d, d)."""
        return self.pack(M)  # right where the structure holds the mirror image of every entry

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

    def inverse(self, K: Tensor) -> Tensor:
        """``K⁻¹``, packed, in the wide dtype; infinite where K has none. No rule needs it."""
        return self.pack(dense_inverse(self.unpack(K)))

    def symmetric_product(self, K: Tensor) -> Tensor:
        """``K Kᵀ``, packed, where the structure holds the mirror image of every entry."""
        raise NotImplementedError(f"{self.name} matrices are not symmetric")

    def project_gram(self, X: Tensor) -> Tensor:
        """``Π(X Xᵀ)``, packed."""
        return self.project(gram(X))

    def project_factor_gram(self, K: Tensor) -> Tensor:
        """``Π(Kᵀ K)``, packed."""
        return self.project_gram(self.unpack(K).mT)

    def project_congruence(self, K: Tensor, U: Tensor, unit: Tensor | None = None) -> Tensor:
        """``Π(Kᵀ U K)``, packed, of a symmetric U (b, d, d), or (b, d) for a diagonal one.

        In the dtype of U, which may be wider than that of K. `unit` (b,): U is divided by it first.
        """
        U, dense = divided(U, unit), self.unpack(K.to(U.dtype))
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
        return self.unpack(M).diagonal(dim1=1, dim2=2).sum(1, dtype=wide_dtype(M.dtype))


@dataclass(frozen=True)
class Dense(Structure):
    """All d×d matrices. Packed (d, d): the matrix itself. Π(M) = M."""

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


def frobenius_norm(structure: Structure, M: Tensor) -> Tensor:
    """``‖M‖_F`` of a packed M, (b,), also where its square leaves the range of the dtype."""
    largest = M.abs().flatten(1).amax(1).clamp(min=1.0)
    return largest * structure.squared_norm(M / per_block(largest, M)).sqrt()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for the half types, the dtype itself otherwise: that of sums."""
    return torch.promote_types(dtype, torch.float32)


def power_of_two(x: Tensor) -> Tensor:
    """The least one that is not below x > 0, at most the dtype's last: dividing by it is exact."""
    last = math.frexp(torch.finfo(x.dtype).max)[1] - 1
    return torch.exp2(torch.ceil(torch.log2(x)).clamp(max=last))


def dense_inverse(M: Tensor) -> Tensor:
    """M⁻¹ of M (..., d, d) in the wide dtype, infinite where it is singular; nothing waits."""
    inverse, info = torch.linalg.inv_ex(M.to(wide_dtype(M.dtype)))
    return torch.where((info != 0)[..., None, None], torch.inf, inverse)


def sum_of_squares(X: Tensor, *, dim: int) -> Tensor:
    """``Σ X²`` along dim, in the wide dtype.

    Widened before squaring: fp16 squares leave the range at |x| > 255. And not by
    ``vector_norm(X)²``, whose plain fp32 accumulation on the CPU is 1 % off at 10⁷ equal entries.
    """
    return X.to(wide_dtype(X.dtype)).square().sum(dim)


def schatten8(M: Tensor, *, dtype: torch.dtype) -> Tensor:
    """(Σ σ⁸)^⅛ over the singular values of M (..., p, q): ‖M‖₂ <= it <= min(p, q)^⅛ ‖M‖₂.

    Two products in `dtype`, no iteration: a smooth function of M, so that trajectories that differ
    by rounding stay together (an estimate by power iteration drove them apart). What is multiplied
    has 1 as its largest entry, so that products of it fit every dtype.
    """
    wide = wide_dtype(M.dtype)
    # Not zero: nothing is divided by zero.
    largest = M.abs().flatten(-2).amax(-1).to(wide).clamp(min=torch.finfo(wide).tiny)
    unit = (M.to(wide) / largest[..., None, None]).to(dtype)
    square = gram(unit if M.shape[-2] <= M.shape[-1] else unit.mT)  # eigenvalues σ²
    # The largest entry of a positive semi-definite matrix is on its diagonal.
    top = square.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=torch.finfo(dtype).tiny)
    square = square / top[..., None, None]
    fourth = gram(square) if is_halved(square) else square @ square
    eighth = sum_of_squares(fourth.flatten(-2), dim=-1)  # Σσ⁸ / top⁴
    return largest * (top.to(wide).sqrt() * eighth.to(wide).pow(0.125)) * SLACK


def gram(X: Tensor) -> Tensor:
    """X Xᵀ of X (..., d, r); on a CPU large ones are computed on and below the diagonal alone."""
    if not is_halved(X):
        return X @ X.mT
    d = X.shape[-2]
    product = X.new_empty(*X.shape[:-1], d)
    for i in range(0, d, _PANEL):
        rows, done = slice(i, i + _PANEL), slice(0, i)
        product[..., rows, : i + _PANEL] = X[..., rows, :] @ X[..., : i + _PANEL, :].mT
        product[..., done, rows] = product[..., rows, done].mT
    return product


def is_halved(X: Tensor) -> bool:
    """Whether `gram` saves a third of the work."""
    return X.device.type == "cpu" and X.dtype == torch.float32 and X.shape[-2] >= 4 * _PANEL


def matricise(G: Tensor, n: int) -> Tensor:
    """G₍ₙ₎: (b, d_1..d_N) -> (b, d_n, ∏_{j≠n} d_j)."""
    matrix: Tensor = G.movedim(n + 1, 1).flatten(2) if G.dim() > 2 else G.unsqueeze(2)
    return matrix


def multiply_axis(G: Tensor, n: int, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a linear map, given on (b, d_n, r), along axis n of G."""
    if G.dim() == 2:
        return multiply(G.unsqueeze(2)).squeeze(2)
    moved = G.movedim(n + 1, 1)
    product: Tensor = multiply(moved.flatten(2)).unflatten(2, moved.shape[2:]).movedim(1, n + 1)
    return product


def in_float16(X: Tensor) -> tuple[Tensor, Tensor]:
    """X/x in fp16 and x (b,), the largest magnitude in each block: fp16 has a small range."""
    largest = X.abs().flatten(1).amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    return (X / per_block(largest, X)).half(), largest


def products_of_others(values: Sequence[Tensor], *, start: Tensor) -> list[Tensor]:
    """start·∏_{j≠n} values[j] for every n."""
    return [
        math.prod([v for j, v in enumerate(values) if j != n], start=start)
        for n in range(len(values))
    ]


def divided(U: Tensor, unit: Tensor | None) -> Tensor:
    """A stack (b, ...) divided by a number for each block."""
    return U if unit is None else U / per_block(unit, U)


def per_block(values: Tensor, like: Tensor) -> Tensor:
    """(b,) shaped to multiply a stack (b, ...)."""
    return values.view(-1, *[1] * (like.dim() - 1))
