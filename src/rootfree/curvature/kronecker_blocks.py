"""Kronecker products (and diagonals, their special case) on a stack of blocks.

With Cₙ = the trace, over all axes but n, of H·⊗_{j≠n} Pⱼ/dⱼ, a rule sees on axis n

    in the frame of factors K:     Π(Kₙᵀ Cₙ Kₙ)  with Pⱼ = KⱼKⱼᵀ      (rules 5 and 7)
    contracted with inverses S⁻¹:  Cₙ            with Pⱼ = Sⱼ⁻¹       (rule 6)

For H = ⊗ Uⱼ with the axes of the preconditioner it is Cₙ = Uₙ ∏_{j≠n} tr(UⱼPⱼ)/dⱼ, for a diagonal
H it is a diagonal, contracted with the diagonals of the Pⱼ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_letters

import torch
from torch import Tensor

from rootfree.blocks import per_block
from rootfree.curvature.outer_product import LARGEST
from rootfree.curvature.regrouping import Part
from rootfree.structures import Structure


@dataclass(frozen=True)
class KroneckerBlocks:
    """⊗ of the parts, which together span the axes of blocks (b, d_1..d_N); times `scale`² (b,).

    Products are in fp32 or wider, whatever the dtype of the factors: unlike a gram, KᵀUK would lose
    its positive definiteness to rounding in half precision once K is near U^(-½).
    """

    parts: tuple[Part, ...]
    sizes: tuple[int, ...]
    scale: Tensor | float = 1.0

    def in_frame(
        self, Ks: Sequence[Tensor], structures: Sequence[Structure]
    ) -> list[tuple[Tensor, Tensor]]:
        """For every axis n: Π(Kₙᵀ Cₙ Kₙ), of parts scaled to entries of at most one, and weight."""
        Ks = [K.to(self._dtype) for K in Ks]

        def P(j: int, diagonal: bool) -> Tensor:  # KⱼKⱼᵀ
            if diagonal:
                return structures[j].squared_rows(Ks[j])
            K = structures[j].unpack(Ks[j])
            return K @ K.mT

        # squared one after the other: the product of scales may be large, that of weights too
        weight = self._ones() * self.scale * self.scale
        traces, grams = [], {}
        for part in self.parts:
            unit = _power_of_two(part.U)
            weight = weight * unit
            part = Part(part.axes, part.U / per_block(unit, part.U))
            for n in part.axes:
                # C <- partial trace of U·⊗ KⱼKⱼᵀ/dⱼ;  h <- Π(KᵀCK)
                C = self._along(part, n, P)
                grams[n] = structures[n].project_congruence(Ks[n], C)
            first = part.axes[0]
            traces.append(structures[first].trace(grams[first]) / self.sizes[first])
        # the other parts come in by their traces
        others = [
            math.prod([t for j, t in enumerate(traces) if j != i], start=weight)
            for i in range(len(traces))
        ]
        weights = {n: others[i] for i, part in enumerate(self.parts) for n in part.axes}
        return [(grams[n], weights[n].clamp(max=LARGEST)) for n in range(len(self.sizes))]

    def contracted(self, inverses: Sequence[Tensor]) -> list[Tensor]:
        """For every axis n: Cₙ with Pⱼ = Sⱼ⁻¹, dense (b, d_n, d_n)."""

        def P(j: int, diagonal: bool) -> Tensor:
            return inverses[j].diagonal(dim1=1, dim2=2) if diagonal else inverses[j]

        Cs, traces = {}, []
        for part in self.parts:
            for n in part.axes:
                Cs[n] = self._along(part, n, P)
            first = part.axes[0]
            # tr(CP)/d; both are symmetric
            product = Cs[first] * P(first, part.is_diagonal)
            traces.append(product.flatten(1).sum(1) / self.sizes[first])
        terms: dict[int, Tensor] = {}
        for i, part in enumerate(self.parts):
            others = math.prod(
                [t for j, t in enumerate(traces) if j != i],
                start=self._ones() * self.scale * self.scale,
            )
            for n in part.axes:
                C = Cs[n].diag_embed() if part.is_diagonal else Cs[n]
                terms[n] = C * per_block(others, C)
        return [terms[n] for n in range(len(self.sizes))]

    def dense(self) -> Tensor:
        """H of blocks with one axis, (b, d, d)."""
        (part,) = self.parts
        H = part.U.diag_embed() if part.is_diagonal else part.U
        return H * per_block(self._ones() * self.scale * self.scale, H)

    def root_mean_diagonal(self) -> Tensor:
        """√(tr H/D), (b,)."""
        root = self._ones() * self.scale
        for part in self.parts:
            diagonal = part.U if part.is_diagonal else part.U.diagonal(dim1=1, dim2=2)
            root = root * diagonal.mean(1).clamp(min=0.0).sqrt()
        return root

    def for_operands(self, dtype: torch.dtype, scale: Tensor | float) -> KroneckerBlocks:
        """The same curvature for factors that were divided by `scale`, in fp32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        parts = tuple(Part(part.axes, part.U.to(wide)) for part in self.parts)
        return KroneckerBlocks(parts, self.sizes, self.scale * scale)

    @property
    def _dtype(self) -> torch.dtype:
        return self.parts[0].U.dtype

    def _ones(self) -> Tensor:
        U = self.parts[0].U
        return U.new_ones(U.shape[0])

    def _along(self, part: Part, n: int, P: Callable[[int, bool], Tensor]) -> Tensor:
        """Trace of U·⊗_{j≠n} Pⱼ/dⱼ over the part's axes j ≠ n: (b, d, d), or diagonal (b, d)."""
        if len(part.axes) == 1:
            return part.U
        sizes = [self.sizes[j] for j in part.axes]
        rows = {j: ascii_letters[1 + 2 * k] for k, j in enumerate(part.axes)}
        columns = rows if part.is_diagonal else {j: chr(ord(r) + 1) for j, r in rows.items()}
        letters = list(rows.values()) + ([] if part.is_diagonal else list(columns.values()))
        operands = [part.U.view(-1, *sizes, *([] if part.is_diagonal else sizes))]
        terms = ["a" + "".join(letters)]
        for j in part.axes:
            if j != n:
                operands.append(P(j, part.is_diagonal) / self.sizes[j])
                terms.append("a" + rows[j] + ("" if part.is_diagonal else columns[j]))
        kept = "a" + rows[n] + ("" if part.is_diagonal else columns[n])
        C: Tensor = torch.einsum(f"{','.join(terms)}->{kept}", *operands)
        return C


def _power_of_two(U: Tensor) -> Tensor:
    """A power of two (b,) at least as large as every entry: dividing by it is exact."""
    largest = U.abs().flatten(1).amax(1).clamp(min=torch.finfo(U.dtype).tiny)
    return torch.exp2(torch.ceil(torch.log2(largest)))
