"""Parameters cut into blocks.

A parameter becomes a tensor of few axes (axes of size one are dropped, small neighbouring input
axes are merged), and each axis longer than the block size is cut into nearly equal pieces. Blocks
of one shape form a *tile*: a regular grid of blocks, a view of the parameter.

Layout of a stack of blocks: (b, d_1, ..., d_N), b counting blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from typing import NamedTuple

from torch import Tensor

# Pieces are multiples of this where possible: matrix units are slow on odd sizes.
_UNIT = 16


@dataclass(frozen=True)
class Tile:
    """A grid of equal blocks inside a parameter viewed with shape `view`.

    Along axis n there are `counts[n]` blocks of size `sizes[n]`, the first at `starts[n]`.
    """

    view: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def blocks(self) -> int:
        """How many blocks the tile has."""
        return math.prod(self.counts)

    @cached_property
    def elements(self) -> int:
        """Elements of one block."""
        return math.prod(self.sizes)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(start, count, size) of each axis."""
        return list(zip(self.starts, self.counts, self.sizes, strict=True))

    def single(self, box: Sequence[tuple[int, int]]) -> Tile:
        """One block of the tile, given by its start and size along each axis."""
        starts = tuple(start for start, _ in box)
        return Tile(self.view, starts, (1,) * len(starts), self.sizes)

    def grid(self, tensor: Tensor) -> Tensor:
        """View (or, for a layout that has none, copy) of a parameter-shaped tensor as
        (counts..., sizes...)."""
        x = tensor.reshape(self.view)
        for axis, (start, count, size) in enumerate(self.runs):
            x = x.narrow(axis, start, count * size)
        n = len(self.sizes)
        x = x.view(tuple(s for pair in zip(self.counts, self.sizes, strict=True) for s in pair))
        return x.permute(*range(0, 2 * n, 2), *range(1, 2 * n, 2))


class Piece(NamedTuple):
    """Elements of a parameter and their places in a stack of blocks: two views of one shape."""

    p: Tensor
    counts: tuple[int, ...]  # the leading axes of the views, which count blocks
    sizes: tuple[int, ...]  # the others, inside a block
    strides: tuple[int, ...]  # of all axes in the parameter, which is contiguous or made so
    offset: int
    stack_strides: tuple[int, ...]
    stack_offset: int  # from where the tile's blocks begin


def pieces_of(p: Tensor, tile: Tile) -> Piece:
    """All blocks of a tile: (counts..., sizes...) in the parameter and in the stack."""
    strides = contiguous_strides(tile.view)
    between = tuple(size * stride for size, stride in zip(tile.sizes, strides, strict=True))
    offset = sum(start * stride for start, stride in zip(tile.starts, strides, strict=True))
    stack = contiguous_strides((*tile.counts, *tile.sizes))
    return Piece(p, tile.counts, tile.sizes, (*between, *strides), offset, stack, 0)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def axes_of(shape: Sequence[int], *, merge_up_to: int | None) -> tuple[int, ...]:
    """The axes that get a factor each: squeezed, and input axes merged while they stay small.

    The first axis (a layer's outputs) is never merged: a matrix stays a matrix.

    >>> axes_of((512, 512, 3, 3), merge_up_to=1024), axes_of((64, 3, 7, 7), merge_up_to=1024)
    ((512, 512, 9), (64, 147))
    """
    axes = [d for d in shape if d != 1] or [1]
    if merge_up_to is None:
        return tuple(axes)
    merged = [axes.pop()]
    while len(axes) > 1:
        d = axes.pop()
        if d * merged[0] <= merge_up_to:
            merged[0] *= d
        else:
            merged.insert(0, d)
    return (*axes, *merged)


def cut(d: int, block_size: int | None) -> list[tuple[int, int, int]]:
    """Runs (start, count, size) of equal pieces that cover an axis of length d.

    The pieces are as few as `block_size` allows; a few more if they then come out equal and
    aligned. Otherwise they differ by one unit, and the last may be smaller.

    >>> cut(3072, 1024), cut(5632, 1024), cut(1000, 512)
    ([(0, 3, 1024)], [(0, 8, 704)], [(0, 1, 512), (512, 1, 488)])
    """
    if block_size is None or d <= block_size:
        return [(0, 1, d)]
    fewest = -(-d // block_size)
    for count in range(fewest, 2 * fewest + 1):
        if d % (count * _UNIT) == 0:
            return [(0, count, d // count)]
    unit = _UNIT if block_size >= 4 * _UNIT else 1
    units = -(-d // unit)
    pieces = -(-units * unit // (block_size // unit * unit))
    small, larger = divmod(units, pieces)
    sizes = [(small + (i < larger)) * unit for i in range(pieces)]
    sizes[-1] -= units * unit - d
    runs, start = [], 0
    for size, alike in groupby(sizes):
        runs.append((start, len(list(alike)), size))
        start += runs[-1][1] * size
    return runs


def tiles_of(axes: tuple[int, ...], block_sizes: Sequence[int | None]) -> list[Tile]:
    """The tiles that cover a tensor of these axes, each axis cut to its block size."""
    runs = [cut(d, size) for d, size in zip(axes, block_sizes, strict=True)]
    tiles = []
    for combination in product(*runs):
        starts, counts, sizes = zip(*combination, strict=True)
        tiles.append(Tile(axes, starts, counts, sizes))
    return tiles
