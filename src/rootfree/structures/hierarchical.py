"""Hierarchical ("rank-k triangular") matrices: a diagonal middle with dense borders."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rootfree.structures.base import dense_inverse, schatten8, sum_of_squares, wide_dtype
from rootfree.structures.block_diagonal import SizedStructure


@dataclass(frozen=True)
class Hierarchical(SizedStructure):
    """k dense rows on top, k at the bottom, a diagonal between them.

            t    c    e
        t [ A    B₁   B₂ ]     A: t×t dense     B₁, B₂: dense
        c [ 0    C    0  ]     C: c×c diagonal
        e [ 0    D    E  ]     D: dense         E: e×e dense

    t = min(k, d), e = min(k, d - t), c = d - t - e: a small d fills A first, then E, so k >= d is
    dense. Swapping the last two block rows and columns makes it block upper triangular; hence
    closed under products. `hierarchical:15` is what SINGD calls `hierarchical15_15`.

    Packed, one flat vector of O(k d) entries:
        top = [A B₁ B₂] (t, d) | middle = diag C (c,) | bottom = [D E] (e, c + e)

    Π(M): A, C, E as in M; B₁, B₂, D twice, since their mirror images are not in the structure.
    """

    kind = "hierarchical"

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return (sum(self._lengths),)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """t, c, e."""
        t = min(self.k, self.d)
        e = min(self.k, self.d - t)
        return t, self.d - t - e, e

    @property
    def _lengths(self) -> tuple[int, int, int]:
        """Packed lengths of top, middle, bottom."""
        t, c, e = self._sizes
        return t * self.d, c, e * (c + e)

    def _parts(self, K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of packed K: top (b, t, d), middle (b, c), bottom (b, e, c + e)."""
        t, c, e = self._sizes
        top, middle, bottom = torch.split_with_sizes(K, self._lengths, dim=1)
        return top.view(-1, t, self.d), middle, bottom.view(K.shape[0], e, c + e)

    def _join(self, top: Tensor, middle: Tensor, bottom: Tensor) -> Tensor:
        """The inverse of `_parts`."""
        return torch.cat([top.flatten(1), middle, bottom.flatten(1)], dim=1)

    def unpack(self, K: Tensor) -> Tensor:
        t, c, _ = self._sizes
        top, middle, bottom = self._parts(K)
        M = K.new_zeros(K.shape[0], self.d, self.d)
        M[:, :t] = top
        M.diagonal(dim1=1, dim2=2)[:, t : t + c] = middle
        M[:, t + c :, t:] = bottom
        return M

    def pack(self, M: Tensor) -> Tensor:
        t, c, _ = self._sizes
        return self._join(M[:, :t], M.diagonal(dim1=1, dim2=2)[:, t : t + c], M[:, t + c :, t:])

    def project(self, M: Tensor) -> Tensor:
        return self._double_borders_(self.pack(M))

    def _double_borders_(self, M: Tensor) -> Tensor:
        """Doubles B₁, B₂ and D of packed M, in place."""
        t, c, _ = self._sizes
        top, _, bottom = self._parts(M)
        top[:, :, t:].mul_(2)
        bottom[:, :, :c].mul_(2)
        return M

    def add_to_diagonal_(self, M: Tensor, value: float) -> Tensor:
        _, c, _ = self._sizes
        top, middle, bottom = self._parts(M)
        top.diagonal(dim1=1, dim2=2).add_(value)  # A starts at column 0 of top ...
        middle.add_(value)
        bottom.diagonal(offset=c, dim1=1, dim2=2).add_(value)  # ... and E at column c of bottom
        return M

    def apply(self, K: Tensor, X: Tensor) -> Tensor:
        t, c, _ = self._sizes
        top, middle, bottom = self._parts(K)
        diagonal = middle.unsqueeze(-1) * X[:, t : t + c]
        return torch.cat([top @ X, diagonal, bottom @ X[:, t:]], dim=1)

    def apply_transposed(self, K: Tensor, X: Tensor) -> Tensor:
        t, c, _ = self._sizes
        top, middle, bottom = self._parts(K)
        Y = top.mT @ X[:, :t]
        Y[:, t:] += bottom.mT @ X[:, t + c :]
        Y[:, t : t + c] += middle.unsqueeze(-1) * X[:, t : t + c]
        return Y

    def product(self, K: Tensor, M: Tensor) -> Tensor:
        t, c, _ = self._sizes
        top, middle, bottom = self._parts(K)
        m_top, m_middle, m_bottom = self._parts(M)
        # [A B₁ B₂]·M, one block row of M after the other
        new_top = top[:, :, :t] @ m_top
        new_top[:, :, t : t + c] += top[:, :, t : t + c] * m_middle.unsqueeze(1)
        new_top[:, :, t:] += top[:, :, t + c :] @ m_bottom
        # [D E]·M, without the first block row, which it does not meet
        new_bottom = bottom[:, :, c:] @ m_bottom
        new_bottom[:, :, :c] += bottom[:, :, :c] * m_middle.unsqueeze(1)
        return self._join(new_top, middle * m_middle, new_bottom)

    def inverse(self, K: Tensor) -> Tensor:
        t, c, _ = self._sizes
        top, middle, bottom = self._parts(K.to(wide_dtype(K.dtype)))
        A, E = dense_inverse(top[:, :, :t]), dense_inverse(bottom[:, :, c:])
        C = middle.reciprocal().unsqueeze(1)
        # row by row of K·K⁻¹ = I
        D = -E @ (bottom[:, :, :c] * C)
        B1 = -A @ (top[:, :, t : t + c] * C + top[:, :, t + c :] @ D)
        B2 = -A @ top[:, :, t + c :] @ E
        return self._join(torch.cat([A, B1, B2], 2), C.squeeze(1), torch.cat([D, E], 2))

    def project_gram(self, X: Tensor) -> Tensor:
        t, c, _ = self._sizes
        top = X[:, :t] @ X.mT
        middle = sum_of_squares(X[:, t : t + c], dim=-1).to(X.dtype)
        bottom = X[:, t + c :] @ X[:, t:].mT
        return self._double_borders_(self._join(top, middle, bottom))

    def project_factor_gram(self, K: Tensor) -> Tensor:
        t, c, _ = self._sizes
        top, middle, bottom = self._parts(K)
        A, B = top[:, :, :t], top[:, :, t:]
        B1, B2 = B[:, :, :c], B[:, :, c:]
        D, E = bottom[:, :, :c], bottom[:, :, c:]
        # diag(B₁ᵀB₁ + C² + DᵀD): the squares of the middle columns
        middle_columns = torch.cat([B1, middle.unsqueeze(1), D], dim=1)
        new_middle = sum_of_squares(middle_columns, dim=1).to(K.dtype)
        new_bottom = B2.mT @ B + E.mT @ bottom  # [B₂ᵀB₁ + EᵀD, B₂ᵀB₂ + EᵀE]
        return self._double_borders_(self._join(A.mT @ top, new_middle, new_bottom))

    def spectral_bound(self, M: Tensor, *, dtype: torch.dtype) -> Tensor:
        # ‖M‖₂² <= ‖dense rows‖₂² + ‖C‖₂²; the gram of the dense rows is only 2k×2k
        t, _, _ = self._sizes
        top, middle, bottom = self._parts(M)
        rows = schatten8(torch.cat([top, pad(bottom, (t, 0))], dim=1), dtype=dtype)
        if middle.shape[1] == 0:
            return rows
        return torch.hypot(rows, middle.abs().amax(1).to(rows.dtype))
