"""Kronecker products, and diagonals, their special case: of a parameter, and on stacks of blocks.

With Cₙ = the trace, over all axes but n, of H·⊗_{j≠n} Pⱼ/dⱼ, a rule sees on axis n

    in the frame of factors K:     Π(Kₙᵀ Cₙ Kₙ)  with Pⱼ = KⱼKⱼᵀ      (rules 5 and 7)
    contracted with inverses S⁻¹:  Cₙ            with Pⱼ = Sⱼ⁻¹       (rule 6)

For H = ⊗ Uⱼ with the axes of the preconditioner it is Cₙ = Uₙ ∏_{j≠n} tr(UⱼPⱼ)/dⱼ, for a diagonal
H it is a diagonal, contracted with the diagonals of the Pⱼ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from string import ascii_letters

import torch
from torch import Tensor

from rootfree.curvature.outer_products import LARGEST
from rootfree.structures import Structure, per_block
from rootfree.structures.base import divided, power_of_two, products_of_others, wide_dtype


@dataclass(frozen=True)
class KroneckerCurvature:
    """A Kronecker product, as KFAC has it; its axes need not be those of the preconditioner.

    Args:
        factors: one for each entry of `axes`: positive semi-definite (d, d), or (d,) for a diagonal
            one. H is their Kronecker product in the order in which the parameter lies in memory.
        axes: the shape that the parameter is viewed with, e.g. (outputs, inputs·height·width).

    Example:
        >>> import torch, rootfree
        >>> H = rootfree.KroneckerCurvature((2 * torch.eye(3), torch.tensor([1.0, 5.0])), (3, 2))
        >>> H.diagonal()
        tensor([[ 2., 10.],
                [ 2., 10.],
                [ 2., 10.]])
    """

    factors: tuple[Tensor, ...]
    axes: tuple[int, ...]
    # The stack of curvatures of one form that it was made with, if any, and its row there.
    _stack: KroneckerStack | None = field(default=None, init=False, repr=False, compare=False)
    _row: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.factors) != len(self.axes) or not self.factors:
            raise ValueError(f"{len(self.factors)} factors for {len(self.axes)} axes {self.axes}")
        for n, (U, d) in enumerate(zip(self.factors, self.axes, strict=True)):
            if U.shape not in ((d, d), (d,)):
                raise ValueError(
                    f"factor {n} must have shape ({d}, {d}), or ({d},) for a diagonal one; "
                    f"got {tuple(U.shape)}"
                )

    def diagonal(self) -> Tensor:
        """The diagonal of H, with shape `axes`."""
        wide = wide_dtype(self.factors[0].dtype)
        product = self.factors[0].new_ones((), dtype=wide)
        for U in self.factors:
            diagonal = U if U.dim() == 1 else U.diagonal()
            product = product.unsqueeze(-1) * diagonal.to(wide)
        return product.view(self.axes)


class FactorStack:
    """A factor of k parameters that are alike in form: U (k, d, d), or (k, d) for diagonal ones."""

    def __init__(self, U: Tensor) -> None:
        self.U = U

    @cached_property
    def rows(self) -> tuple[Tensor, ...]:
        """The factors one by one: views."""
        return self.U.unbind()

    @cached_property
    def largest(self) -> Tensor:
        """The largest magnitude in each, (k,): NaN where a number is NaN."""
        norms: Tensor = torch.linalg.vector_norm(self.U.flatten(1), math.inf, dim=1)
        return norms


class KroneckerStack:
    """The curvature of k parameters that are alike in form.

    It is checked and cut for all of them at once: calls for each of a hundred layers would take the
    host a hundred times as long.
    """

    def __init__(self, factors: Sequence[FactorStack]) -> None:
        self.factors = tuple(factors)
        self.axes = tuple(factor.U.shape[1] for factor in factors)

    def row(self, i: int) -> KroneckerCurvature:
        """H of the i-th parameter."""
        H = object.__new__(KroneckerCurvature)
        rows = tuple([factor.rows[i] for factor in self.factors])
        H.__dict__.update(factors=rows, axes=self.axes, _stack=self, _row=i)
        return H

    def __len__(self) -> int:
        return len(self.factors[0].U)

    @staticmethod
    def of(Hs: Sequence[KroneckerCurvature]) -> KroneckerStack:
        """A stack of these: the one whose rows they are, all and in order, or a new one."""
        known, places = Hs[0]._stack, [(H._stack, H._row) for H in Hs]
        if known is not None and places == [(known, i) for i in range(len(known))]:
            return known
        alike = zip(*[H.factors for H in Hs], strict=True)
        return KroneckerStack([FactorStack(torch.stack(factors)) for factors in alike])


@dataclass(frozen=True)
class Part:
    """Curvature over some neighbouring axes of a stack of blocks, whose sizes have product D.

    U: (b, D, D), or (b, D) where it is diagonal. `largest` (b,): the largest magnitude in each.
    """

    axes: tuple[int, ...]
    U: Tensor
    largest: Tensor | None = None

    @property
    def is_diagonal(self) -> bool:
        """Whether U is the diagonal of a matrix."""
        return self.U.dim() == 2

    def ones(self) -> Tensor:
        """A one for each block: (b,)."""
        return self.U.new_ones(len(self.U))

    def to(self, dtype: torch.dtype) -> Part:
        """The same in another dtype."""
        if self.U.dtype == dtype:
            return self
        return Part(self.axes, self.U.to(dtype), self.largest)

    def rows(self, rows: slice) -> Part:
        """That of some of the blocks."""
        return Part(self.axes, self.U[rows], None if self.largest is None else self.largest[rows])

    def unit(self) -> Tensor:
        """A power of two for each block, at least as large as its numbers: (b,)."""
        largest = self.largest
        if largest is None:
            largest = torch.linalg.vector_norm(self.U.flatten(1), math.inf, dim=1)
        return power_of_two(largest.to(self.U.dtype).clamp(min=torch.finfo(self.U.dtype).tiny))


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

        def P(j: int, diagonal: bool) -> Tensor:  # KⱼKⱼᵀ
            wide = Ks[j].to(self.parts[0].U.dtype)
            if diagonal:
                return structures[j].squared_rows(wide)
            K = structures[j].unpack(wide)
            return K @ K.mT

        weight, traces, grams = self._weight, [], {}
        for part in self.parts:
            unit = part.unit()
            weight = weight * unit
            first = part.axes[0]
            if len(part.axes) == 1:
                grams[first] = structures[first].project_congruence(Ks[first], part.U, unit)
            else:
                part = Part(part.axes, divided(part.U, unit))
                for n in part.axes:
                    # C <- partial trace of U·⊗ KⱼKⱼᵀ/dⱼ;  h <- Π(KᵀCK)
                    C = self._along(part, n, P)
                    grams[n] = structures[n].project_congruence(Ks[n], C)
            traces.append(structures[first].trace(grams[first]) / self.sizes[first])
        weights = self._beside(traces, weight)
        return [(grams[n], weights[n].clamp(max=LARGEST)) for n in range(len(self.sizes))]

    def contracted(self, inverses: Sequence[Tensor]) -> list[Tensor]:
        """For every axis n: Cₙ with Pⱼ = Sⱼ⁻¹, dense (b, d_n, d_n)."""

        def P(j: int, diagonal: bool) -> Tensor:
            return inverses[j].diagonal(dim1=1, dim2=2) if diagonal else inverses[j]

        Cs, traces = {}, []
        units = [part.unit() for part in self.parts]
        # The scales bring H back from the end of the range: neither they nor the units in a row.
        weight = math.prod(
            units[1:], start=self.parts[0].ones() * self.scale * units[0] * self.scale
        )
        for part, unit in zip(self.parts, units, strict=True):
            part = Part(part.axes, divided(part.U, unit))
            for n in part.axes:
                Cs[n] = self._along(part, n, P)
            first = part.axes[0]
            # tr(CP)/d; both are symmetric
            product = Cs[first] * P(first, part.is_diagonal)
            traces.append(product.flatten(1).sum(1) / self.sizes[first])
        weights = self._beside(traces, weight)
        dense = [C if C.dim() == 3 else C.diag_embed() for _, C in sorted(Cs.items())]
        return [C * per_block(weights[n], C) for n, C in enumerate(dense)]

    def dense(self) -> Tensor:
        (part,) = self.parts
        H = part.U.diag_embed() if part.is_diagonal else part.U
        return H * per_block(self._weight, H)

    def root_mean_diagonal(self, sizes: Sequence[int]) -> Tensor:
        root = self.parts[0].ones() * self.scale
        for part in self.parts:
            diagonal = part.U if part.is_diagonal else part.U.diagonal(dim1=1, dim2=2)
            # the sum of many that are large may be infinite where none of them is
            root = root * diagonal.mean(1).clamp(0.0, torch.finfo(diagonal.dtype).max).sqrt()
        return root

    def for_operands(self, dtype: torch.dtype, scale: Tensor | float) -> KroneckerBlocks:
        parts = tuple(part.to(wide_dtype(dtype)) for part in self.parts)
        return KroneckerBlocks(parts, self.sizes, self.scale * scale)

    def rows(self, rows: slice) -> KroneckerBlocks:
        scale = self.scale[rows] if isinstance(self.scale, Tensor) else self.scale
        parts = tuple(part.rows(rows) for part in self.parts)
        return KroneckerBlocks(parts, self.sizes, scale)

    @property
    def _weight(self) -> Tensor:
        """scale² (b,)."""
        # one after the other: the product of scales may be large, that of weights too
        return self.parts[0].ones() * self.scale * self.scale

    def _beside(self, traces: Sequence[Tensor], weight: Tensor) -> dict[int, Tensor]:
        """For every axis: the weight times the traces of all parts but the axis's own."""
        others = products_of_others(traces, start=weight)
        return {n: others[i] for i, part in enumerate(self.parts) for n in part.axes}

    def _along(self, part: Part, n: int, P: Callable[[int, bool], Tensor]) -> Tensor:
        """Trace of U·⊗_{j≠n} Pⱼ/dⱼ over the part's axes j ≠ n: (b, d, d), or diagonal (b, d)."""
        if len(part.axes) == 1:
            return part.U
        # a counts blocks; axis j has a letter for its rows and, unless U is diagonal, its columns
        each = 1 if part.is_diagonal else 2
        letters = {j: ascii_letters[1 + 2 * k :][:each] for k, j in enumerate(part.axes)}
        sizes = [self.sizes[j] for j in part.axes]
        terms = ["a" + "".join(chain(*zip(*letters.values(), strict=True)))]
        operands = [part.U.view(-1, *sizes * each)]
        for j in part.axes:
            if j != n:
                terms.append("a" + letters[j])
                operands.append(P(j, part.is_diagonal) / self.sizes[j])
        C: Tensor = torch.einsum(f"{','.join(terms)}->a{letters[n]}", *operands)
        return C
