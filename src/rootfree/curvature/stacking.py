"""From the curvature of parameters to that of a stack of blocks.

Layout: a stack is (b, d_1..d_N); the blocks of one tile of one parameter are neighbours in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from rootfree.curvature.kronecker import (
    KroneckerBlocks,
    KroneckerCurvature,
    KroneckerStack,
    Part,
)
from rootfree.curvature.outer_products import OuterProducts, SumOfOuterProducts
from rootfree.curvature.protocol import ParameterCurvature
from rootfree.curvature.regrouping import entries_at, places_of, regroup
from rootfree.layout.buckets import rows_in
from rootfree.layout.tiles import Tile
from rootfree.structures import Structure
from rootfree.structures.base import wide_dtype


class BlockCurvature(Protocol):
    """Curvature of a stack of blocks, as the rules use it."""

    def in_frame(
        self, Ks: Sequence[Tensor], structures: Sequence[Structure]
    ) -> list[tuple[Tensor, Tensor]]:
        """Per axis n: packed Π of the partial trace of KᵀHK over the others, and weight (b,)."""

    def contracted(self, inverses: Sequence[Tensor]) -> list[Tensor]:
        """Per axis n: the partial trace of H·⊗_{j≠n} Sⱼ⁻¹ over the others, divided by D₋ₙ."""

    def dense(self) -> Tensor:
        """H of blocks with one axis, (b, d, d)."""

    def root_mean_diagonal(self, sizes: Sequence[int]) -> Tensor:
        """√(tr H/D), (b,), for blocks of these sizes."""

    def rows(self, rows: slice) -> BlockCurvature:
        """The curvature of some of the blocks."""

    def for_operands(self, dtype: torch.dtype, scale: Tensor | float) -> BlockCurvature:
        """The same curvature for products in `dtype` with factors that were divided by `scale`."""


def blocks_of(
    given: Sequence[tuple[Tile, ParameterCurvature | None]], G: Tensor, *, B: int
) -> BlockCurvature:
    """Curvature of the stack with gradients G; where none is given it is B·ggᵀ.

    Tiles whose curvature has the same form are worked on together.
    """
    if all(H is None for _, H in given):
        return OuterProducts(G, weight=B)
    alike: dict[Any, tuple[list[slice], list[_Run]]] = {}
    first = 0
    for look, neighbours in groupby(given, key=_look):
        run = list(neighbours)
        blocks = sum(tile.blocks for tile, _ in run)
        rows, runs = alike.setdefault(_form(look), ([], []))
        rows.append(slice(first, first + blocks))
        runs.append(run)
        first += blocks
    members = [
        (rows, _stack(form, runs, _take(G, rows), B=B)) for form, (rows, runs) in alike.items()
    ]
    return members[0][1] if len(members) == 1 else MixedCurvature(tuple(members))


#: tiles next to each other in the stack, with curvature that can be cut in one go
_Run = Sequence[tuple[Tile, Any]]


def _look(given: tuple[Tile, ParameterCurvature | None]) -> tuple[Any, ...]:
    """What must agree for two curvatures to be cut in one go."""
    tile, H = given
    if isinstance(H, KroneckerCurvature):
        return "kronecker", tile, H.axes, tuple([U.dim() for U in H.factors])
    if isinstance(H, SumOfOuterProducts):
        return "outer products", len(H.V)
    return ("gradient",) if H is None else ("diagonal", tile, H.h.shape)


@lru_cache(maxsize=1024)
def _form(look: tuple[Any, ...]) -> tuple[Any, ...]:
    """What must agree for two curvatures to be stacked."""
    if look[0] == "diagonal":
        return "kronecker", ((range(len(look[1].view)), True),)
    if look[0] == "kronecker":
        _, tile, axes, dims = look
        groups = regroup(tile.view, axes)
        return "kronecker", tuple((ns, all(dims[m] == 1 for m in ms)) for ns, ms in groups)
    return look


def _stack(form: tuple[Any, ...], runs: Sequence[_Run], G: Tensor, *, B: int) -> BlockCurvature:
    if form[0] == "gradient":
        return OuterProducts(G.unsqueeze(-1), scale=B**0.5)
    if form[0] == "outer products":
        given = [each for run in runs for each in run]
        V = torch.empty(*G.shape, form[1], dtype=G.dtype, device=G.device)
        parts = V.split([tile.blocks for tile, _ in given])
        for (tile, H), part in zip(given, parts, strict=True):
            part.view(*tile.counts, *tile.sizes, form[1]).copy_(_grid_of_many(tile, H.V))
        return OuterProducts(V, given=True)
    wide = wide_dtype(G.dtype)
    restricted = [_parts([H for _, H in run], run[0][0], wide) for run in runs]
    return KroneckerBlocks(
        tuple(
            members[0]
            if len(members) == 1
            else Part(members[0].axes, torch.cat([part.U for part in members]))
            for members in zip(*restricted, strict=True)
        ),
        tuple(G.shape[1:]),
    )


def _parts(Hs: Sequence[Any], tile: Tile, dtype: torch.dtype) -> list[Part]:
    if isinstance(Hs[0], KroneckerCurvature):
        return parts_of(Hs, tile, dtype=dtype)
    # A diagonal is one part over all axes, and is cut as a gradient is.
    h = _grid_of_many(tile, torch.stack([H.h for H in Hs]).to(dtype).abs())
    return [Part(tuple(range(len(tile.view))), h.movedim(-1, 0).reshape(len(Hs) * tile.blocks, -1))]


def parts_of(Hs: Sequence[KroneckerCurvature], tile: Tile, *, dtype: torch.dtype) -> list[Part]:
    """The restriction of each H to every block of a tile: sub-blocks of the regrouped factors.

    Exact: the entries of a Kronecker product are products of entries. The Hs are alike in form.
    """
    parts, stack = [], KroneckerStack.of(Hs)
    for ns, ms in regroup(tile.view, stack.axes):
        if len(ms) == 1 and tile.sizes == tile.view:  # whole parameters
            factor = stack.factors[ms[0]]
            parts.append(Part(tuple(ns), factor.U, factor.largest).to(dtype))
            continue
        factors = [stack.factors[m].U.to(dtype) for m in ms]
        blocks = [1] * len(tile.counts)  # the blocks along these axes; the others repeat them
        for n in ns:
            blocks[n] = tile.counts[n]
        uncut = all(tile.sizes[n] == tile.view[n] for n in ns)
        if uncut and len(factors) == 1:
            U = factors[0].unsqueeze(1)
        else:
            U = entries_at(factors, places_of(tile, ns, factors[0].device))
        sizes = U.shape[2:]
        U = U.view(len(Hs), *blocks, *sizes).expand(len(Hs), *tile.counts, *sizes)
        parts.append(Part(tuple(ns), U.reshape(len(Hs) * tile.blocks, *sizes)))
    return parts


def _grid_of_many(tile: Tile, V: Tensor) -> Tensor:
    """Blocks of V (r, *parameter): (counts..., sizes..., r)."""
    r = len(V)
    many = Tile((r, *tile.view), (0, *tile.starts), (1, *tile.counts), (r, *tile.sizes))
    return many.grid(V).squeeze(0).movedim(len(tile.counts), -1)


def cut_out(tile: Tile, V: Tensor) -> tuple[Tile, SumOfOuterProducts]:
    """The part of V (r, *parameter) in a tile of one block, with a tile that is all of it."""
    block = _grid_of_many(tile, V).movedim(-1, 0).reshape(len(V), *tile.sizes)
    one = (1,) * len(tile.sizes)
    return Tile(tile.sizes, (0,) * len(one), one, tile.sizes), SumOfOuterProducts(block.clone())


@dataclass(frozen=True)
class MixedCurvature:
    """Curvature of several forms in one stack: the rows of the stack, and what is theirs."""

    members: tuple[tuple[list[slice], BlockCurvature], ...]

    def in_frame(
        self, Ks: Sequence[Tensor], structures: Sequence[Structure]
    ) -> list[tuple[Tensor, Tensor]]:
        seen = [H.in_frame([_take(K, rows) for K in Ks], structures) for rows, H in self.members]
        return [
            (self._put([gram for gram, _ in axis]), self._put([weight for _, weight in axis]))
            for axis in zip(*seen, strict=True)
        ]

    def contracted(self, inverses: Sequence[Tensor]) -> list[Tensor]:
        seen = [H.contracted([_take(S, rows) for S in inverses]) for rows, H in self.members]
        return [self._put(axis) for axis in zip(*seen, strict=True)]

    def dense(self) -> Tensor:
        return self._put([H.dense() for _, H in self.members])

    def root_mean_diagonal(self, sizes: Sequence[int]) -> Tensor:
        return self._put([H.root_mean_diagonal(sizes) for _, H in self.members])

    def rows(self, rows: slice) -> MixedCurvature:
        members = []
        for theirs, H in self.members:
            done = 0  # rows of H before the slice
            for each in theirs:
                start, stop = max(each.start, rows.start), min(each.stop, rows.stop)
                if start < stop:
                    first = done + start - each.start
                    place = slice(start - rows.start, stop - rows.start)
                    members.append(([place], H.rows(slice(first, first + stop - start))))
                done += each.stop - each.start
        return MixedCurvature(tuple(members))

    def for_operands(self, dtype: torch.dtype, scale: Tensor | float) -> MixedCurvature:
        members = []
        for rows, H in self.members:
            own = _take(scale, rows) if isinstance(scale, Tensor) else scale
            members.append((rows, H.for_operands(dtype, own)))
        return MixedCurvature(tuple(members))

    def _put(self, stacks: Sequence[Tensor]) -> Tensor:
        """The members' rows in the order of the stack, in the widest of their dtypes."""
        pieces: dict[int, Tensor] = {}
        for (rows, _), stack in zip(self.members, stacks, strict=True):
            split = stack.split([row.stop - row.start for row in rows])
            pieces.update({row.start: piece for row, piece in zip(rows, split, strict=True)})
        return torch.cat([pieces[start] for start in sorted(pieces)])


def _take(stack: Tensor, rows: Sequence[slice]) -> Tensor:
    if rows[0].start == 0 and sum(row.stop - row.start for row in rows) == len(stack):
        return stack
    return rows_in(stack, rows)
