"""Where every block lies, in its parameter and in the stack: the tables of triton_blocks.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rootfree.layout.tiles import Piece, contiguous_strides

# A program's share of a rectangle. What is one piece of memory is cut into rows of COLS.
ROWS, COLS, WARPS = 4, 1024, 8


class Rectangle(NamedTuple):
    """Rows of a block that are regular both in the parameter and in the stack."""

    parameter: int
    offset: int
    distance: int  # of rows in the parameter
    columns: int
    elements: int
    stack: int
    pitch: int  # distance of rows in the stack


class Item(NamedTuple):
    """What one program does: at most ROWS×COLS of a rectangle."""

    rectangle: int
    row: int
    column: int
    place: int  # of its partial sum of squared gradients


def with_room(piece: Piece, sizes: Sequence[int], rooms: Sequence[int]) -> Piece:
    """A piece of a stack of blocks of these sizes, where the stack has room for larger ones."""
    move = partial(_moved, sizes=sizes, rooms=rooms)
    strides = tuple(map(move, piece.stack_strides))
    return piece._replace(stack_strides=strides, stack_offset=move(piece.stack_offset))


def _moved(place: int, sizes: Sequence[int], rooms: Sequence[int]) -> int:
    """Where an element of a stack is when its blocks have more room; of a stride, what it is."""
    block, place = divmod(place, math.prod(sizes))
    moved = block
    for old, new, d in zip(contiguous_strides(sizes), rooms, sizes, strict=True):
        moved = moved * new + place // old % d
    return moved


def rectangles_of(
    piece: Piece, *, parameter: int, stack: int, block: int
) -> Iterator[tuple[int, Rectangle]]:
    """The rectangles of a piece, each with the number of its block in the tile.

    `stack`: where the tile's blocks begin in the stack; `block`: elements of one.
    """
    n = len(piece.counts)
    axes = list(zip((*piece.counts, *piece.sizes), piece.strides, piece.stack_strides, strict=True))
    levels = _merged(axes[n:])
    if levels[-1][1:] != (1, 1):
        levels.append((1, 1, 1))
    outer = axes[:n] + levels[:-2]
    rows, columns = ([(1, 0, 0), *levels])[-2:]
    if rows[1] * ROWS >= 2**31:  # the kernels count in int32 inside a share: row by row
        outer, rows = axes[:n] + levels[:-1], (1, 0, 0)
    shape = (rows[1], columns[0], rows[0] * columns[0])
    pitch = rows[2]
    if rows[0] == 1:
        shape, pitch = (COLS, COLS, columns[0]), COLS
    for index in product(*(range(size) for size, _, _ in outer)):
        steps = list(zip(index, outer, strict=True))
        offset = piece.offset + sum(i * stride for i, (_, stride, _) in steps)
        place = piece.stack_offset + sum(i * stride for i, (_, _, stride) in steps)
        yield place // block, Rectangle(parameter, offset, *shape, stack + place, pitch)


def _merged(axes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(size, stride, stride in the stack) from the outermost in, neighbours without gaps merged."""
    levels: list[tuple[int, int, int]] = []
    for size, stride, pitch in reversed([axis for axis in axes if axis[0] != 1]):
        if levels and (stride, pitch) == (levels[0][0] * levels[0][1], levels[0][0] * levels[0][2]):
            levels[0] = (size * levels[0][0], *levels[0][1:])
        else:
            levels.insert(0, (size, stride, pitch))
    return levels or [(1, 1, 1)]


def items_of(rectangle: Rectangle, *, number: int, place: int) -> list[Item]:
    """The programs of a rectangle; their partial sums are next to each other."""
    rows = -(-rectangle.elements // rectangle.columns)
    starts = product(range(0, rows, ROWS), range(0, rectangle.columns, COLS))
    return [Item(number, row, column, place + i) for i, (row, column) in enumerate(starts)]


def items_in(rectangle: Rectangle) -> int:
    """How many items a rectangle has."""
    rows = -(-rectangle.elements // rectangle.columns)
    return -(-rows // ROWS) * -(-rectangle.columns // COLS)


def aligned(rectangles: Sequence[Rectangle]) -> bool:
    """Whether rows start and end at multiples of eight numbers."""
    return all(value % 8 == 0 for rectangle in rectangles for value in rectangle[1:])


def as_table(rows: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of integers on the device, sent without waiting for it."""
    table = torch.tensor(rows, dtype=dtype, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
