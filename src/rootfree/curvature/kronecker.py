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
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from rootfree.curvature.outer_products import LARGEST
from rootfree.curvature.regrouping import regroup
from rootfree.layout.tiles import Tile
from rootfree.structures import Structure, per_block
from rootfree.structures.base import divided, power_of_two


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
        wide = torch.promote_types(self.factors[0].dtype, torch.float32)
        product = self.factors[0].new_ones((), dtype=wide)
        for U in self.factors:
            diagonal = U if U.dim() == 1 else U.diagonal()
            product = product.unsqueeze(-1) * diagonal.to(wide)
        return product.view(self.axes)


@dataclass(frozen=True)
class Part:
    """Curvature over some neighbouring axes of a stack of blocks, whose sizes have product D.

    U: (b, D, D), or (b, D) where it is diagonal.
    """

    axes: tuple[int, ...]
    U: Tensor

    @property
    def is_diagonal(self) -> bool:
        """Whether U is the diagonal of a matrix."""
        return self.U.dim() == 2


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
            wide = Ks[j].to(self._dtype)
            if diagonal:
                return structures[j].squared_rows(wide)
            K = structures[j].unpack(wide)
            return K @ K.mT

        # squared one after the other: the product of scales may be large, that of weights too
        weight = self._ones() * self.scale * self.scale
        traces, grams = [], {}
        for part in self.parts:
            largest: Tensor = torch.linalg.vector_norm(part.U.flatten(1), math.inf, dim=1)
            unit = power_of_two(largest.clamp(min=torch.finfo(largest.dtype).tiny))
            weight = weight * unit
            first, alone = part.axes[0], len(part.axes) == 1
            if alone:
                grams[first] = structures[first].project_congruence(Ks[first], part.U, unit)
            else:
                part = Part(part.axes, divided(part.U, unit))
            for n in [] if alone else part.axes:
                # C <- partial trace of U·⊗ KⱼKⱼᵀ/dⱼ;  h <- Π(KᵀCK)
                C = self._along(part, n, P)
                grams[n] = structures[n].project_congruence(Ks[n], C)
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
        (part,) = self.parts
        H = part.U.diag_embed() if part.is_diagonal else part.U
        return H * per_block(self._ones() * self.scale * self.scale, H)

    def root_mean_diagonal(self, sizes: Sequence[int]) -> Tensor:
        root = self._ones() * self.scale
        for part in self.parts:
            diagonal = part.U if part.is_diagonal else part.U.diagonal(dim1=1, dim2=2)
            root = root * diagonal.mean(1).clamp(min=0.0).sqrt()
        return root

    def for_operands(self, dtype: torch.dtype, scale: Tensor | float) -> KroneckerBlocks:
        wide = torch.promote_types(dtype, torch.float32)
        parts = tuple(Part(part.axes, part.U.to(wide)) for part in self.parts)
        return KroneckerBlocks(parts, self.sizes, self.scale * scale)

    def rows(self, rows: slice) -> KroneckerBlocks:
        scale = self.scale[rows] if isinstance(self.scale, Tensor) else self.scale
        parts = tuple(Part(part.axes, part.U[rows]) for part in self.parts)
        return KroneckerBlocks(parts, self.sizes, scale)

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


def parts_of(Hs: Sequence[KroneckerCurvature], tile: Tile, *, dtype: torch.dtype) -> list[Part]:
    """The restriction of each H to every block of a tile: sub-blocks of the regrouped factors.

    Exact: the entries of a Kronecker product are products of entries. The Hs are alike in form.
    """
    parts = []
    for ns, ms in regroup(tile.view, Hs[0].axes):
        factors = [together([H.factors[m] for H in Hs]).to(dtype) for m in ms]
        blocks = [1] * len(tile.counts)  # the blocks along these axes; the others repeat them
        for n in ns:
            blocks[n] = tile.counts[n]
        uncut = all(tile.sizes[n] == tile.view[n] for n in ns)
        if uncut and len(factors) == 1:
            U = factors[0].unsqueeze(1)
        else:
            U = _entries(factors, _places(tile, ns, factors[0].device))
        sizes = U.shape[2:]
        U = U.view(len(Hs), *blocks, *sizes).expand(len(Hs), *tile.counts, *sizes)
        parts.append(Part(tuple(ns), U.reshape(len(Hs) * tile.blocks, *sizes)))
    return parts


def together(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one stack: a view where they are its rows already, else a copy."""
    rows = rows_of_one(tensors)
    return torch.stack(tuple(tensors)) if rows is None else rows


def rows_of_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The stack that tensors of one shape are the rows of; None: they are not, or not in order."""
    first = tensors[0]
    start, step, memory = first.storage_offset(), first.numel(), memory_of(first)
    for i, t in enumerate(tensors):
        if t.storage_offset() != start + i * step or t.dtype != first.dtype:
            return None
        if memory_of(t) != memory or not t.is_contiguous():
            return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), start)


def memory_of(t: Tensor) -> int:
    """What tells the memory of a tensor from others; also of tensors without numbers."""
    storage: Any = t.untyped_storage()
    return int(storage._cdata)


def _places(tile: Tile, ns: range, device: torch.device) -> Tensor:
    """Flat places of the elements of each block along the axes ns: (blocks, elements)."""
    places = torch.zeros((), dtype=torch.long, device=device)
    for n in ns:
        start, count, size = tile.starts[n], tile.counts[n], tile.sizes[n]
        along = torch.arange(start, start + count * size, device=device).view(count, size)
        # (blocks, 1, elements, 1) and (1, count, 1, size): the later axis varies faster
        places = places.view(-1, 1, places.shape[-1] if places.dim() else 1, 1) * tile.view[n]
        places = (places + along[:, None, :]).flatten(2).flatten(0, 1)
    return places


def _entries(factors: Sequence[Tensor], places: Tensor) -> Tensor:
    """⊗ of the factors (k, d, d) at places (c, D): (k, c, D, D), or (k, c, D) for diagonal ones."""
    sizes = [U.shape[1] for U in factors]
    diagonal = all(U.dim() == 2 for U in factors)
    product: Tensor | None = None
    for m, U in enumerate(factors):
        i = places // math.prod(sizes[m + 1 :]) % sizes[m]
        if diagonal:
            entries = U[:, i]
        elif U.dim() == 2:
            entries = U[:, i].unsqueeze(3) * (i.unsqueeze(2) == i.unsqueeze(1))
        else:
            entries = U[:, i.unsqueeze(2), i.unsqueeze(1)]
        product = entries if product is None else product * entries
    assert product is not None
    return product
