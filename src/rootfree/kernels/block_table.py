"""Tables of where every block lies in its parameter and in the stack, for triton_blocks.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rootfree.kernels.axis_products import room
from rootfree.layout.tiles import Piece, contiguous_strides

if TYPE_CHECKING:
    from rootfree.kernels.stack import Share

# A program's share of a rectangle. One contiguous piece of memory is cut into rows of COLS. A
# column, such as a bias beside its weight, has a share of another shape: it would fill only a
# thousandth of the usual one.
ROWS, COLS, WARPS = 4, 1024, 8
SHARE, COLUMN = (ROWS, COLS), (ROWS * COLS, 1)


class Rectangle(NamedTuple):
    """Rows of a block that have regular distances both in the parameter and in the stack."""

    parameter: int
    offset: int
    distance: int  # of rows in the parameter
    columns: int
    elements: int
    stack: int
    pitch: int  # distance of rows in the stack


class Item(NamedTuple):
    """The work of one program: at most a share of a rectangle."""

    rectangle: int
    row: int
    column: int
    place: int  # index of its partial sum of squared gradients


def with_room(piece: Piece, sizes: Sequence[int], rooms: Sequence[int]) -> Piece:
    """A piece of a stack of blocks of these sizes, after the blocks are padded to `rooms`."""
    move = partial(_moved, sizes=sizes, rooms=rooms)
    strides = tuple(map(move, piece.stack_strides))
    return piece._replace(stack_strides=strides, stack_offset=move(piece.stack_offset))


def _moved(place: int, sizes: Sequence[int], rooms: Sequence[int]) -> int:
    """The new offset of an element when the blocks of its stack are padded; strides map alike."""
    block, place = divmod(place, math.prod(sizes))
    moved = block
    for old, new, d in zip(contiguous_strides(sizes), rooms, sizes, strict=True):
        moved = moved * new + place // old % d
    return moved


def rectangles_of(
    piece: Piece, *, parameter: int, stack: int, block: int
) -> Iterator[tuple[int, Rectangle]]:
    """The rectangles of a piece, each with the index of its block in the tile.

    `stack`: where the tile's blocks begin in the stack; `block`: the number of elements of a block.
    """
    n = len(piece.counts)
    axes = list(zip((*piece.counts, *piece.sizes), piece.strides, piece.stack_strides, strict=True))
    levels = _merged(axes[n:])
    if levels[-1][1:] != (1, 1):
        levels.append((1, 1, 1))
    outer = axes[:n] + levels[:-2]
    rows, columns = ([(1, 0, 0), *levels])[-2:]
    if rows[1] * ROWS >= 2**31:  # too far apart for the kernels' int32 offsets: row by row
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
    """(size, stride, stride in the stack), outermost first; axes without gaps are merged."""
    levels: list[tuple[int, int, int]] = []
    for size, stride, pitch in reversed([axis for axis in axes if axis[0] != 1]):
        if levels and (stride, pitch) == (levels[0][0] * levels[0][1], levels[0][0] * levels[0][2]):
            levels[0] = (size * levels[0][0], *levels[0][1:])
        else:
            levels.insert(0, (size, stride, pitch))
    return levels or [(1, 1, 1)]


def is_column(rectangle: Rectangle) -> bool:
    """Whether it is a column, close enough in memory for the kernels' int32 offsets."""
    far = max(rectangle.distance, rectangle.pitch)
    return rectangle.columns == 1 and far * COLUMN[0] < 2**31


def items_of(
    rectangle: Rectangle, *, number: int, place: int, share: tuple[int, int] = SHARE
) -> list[Item]:
    """The items of a rectangle; their partial sums are adjacent."""
    rows = -(-rectangle.elements // rectangle.columns)
    starts = product(range(0, rows, share[0]), range(0, rectangle.columns, share[1]))
    return [Item(number, row, column, place + i) for i, (row, column) in enumerate(starts)]


def items_in(rectangle: Rectangle, share: tuple[int, int] = SHARE) -> int:
    """The number of items of a rectangle."""
    rows = -(-rectangle.elements // rectangle.columns)
    return -(-rows // share[0]) * -(-rectangle.columns // share[1])


@dataclass
class Placed:
    """Where the blocks of shares, and their partial sums, are in a stack."""

    #: for each share: first element, padded sizes, first sum, number of sums per block
    shares: list[tuple[int, tuple[int, ...], int, int]]
    #: for each parameter: its rectangles, with the indices of their first sums
    of_parameter: list[list[tuple[Rectangle, int]]]
    shapes: list[tuple[int, int]]  # for each parameter: the shape of a program's share
    elements: int = 0
    sums: int = 0
    ragged: bool = False  # whether some blocks have fewer sums than others of their share
    gaps: bool = False  # whether some elements belong to no parameter


def placed(shares: Sequence[Share], where: Mapping[Tensor, int]) -> Placed:
    """Place one share after the other; `where`: positions of the parameters with gradients."""
    made, filled = Placed([], [[] for _ in where], [COLUMN] * len(where)), 0
    found: list[tuple[tuple[int, ...], int, list[list[Rectangle]]]] = []
    for share in shares:
        blocks: list[list[Rectangle]] = [[] for _ in range(share.blocks)]
        start, first, sizes = made.elements, 0, share.slots[0].tile.sizes
        matrices = share.bucket.plan.kernel is not None and len(sizes) > 1
        rooms = tuple(map(room, sizes)) if matrices else sizes
        elements = math.prod(rooms)
        for slot in share.slots:
            for piece in slot.pieces:
                if piece.p in where:
                    piece = piece if rooms == sizes else with_room(piece, sizes, rooms)
                    i = where[piece.p]
                    in_stack = {"parameter": i, "stack": start, "block": elements}
                    for number, rectangle in rectangles_of(piece, **in_stack):
                        blocks[first + number].append(rectangle)
                        filled += rectangle.elements
                        if not is_column(rectangle):
                            made.shapes[i] = SHARE
            first += slot.tile.blocks
            start += slot.tile.blocks * elements
        found.append((rooms, made.elements, blocks))
        filled += -start % 64
        made.elements = start + -start % 64  # aligned for the matrix units
    for rooms, start, blocks in found:
        # A block inside a larger parameter is cut into its rows, a whole parameter into rows of
        # COLS. So blocks of one share may have different numbers of items.
        counts = [sum(items_in(r, made.shapes[r.parameter]) for r in block) for block in blocks]
        most = max(counts)
        made.ragged = made.ragged or min(counts) < most
        made.shares.append((start, rooms, made.sums, most))
        for block in blocks:
            at = made.sums
            for rectangle in block:
                made.of_parameter[rectangle.parameter].append((rectangle, at))
                at += items_in(rectangle, made.shapes[rectangle.parameter])
            made.sums += most
    # Padding, and the parameter without a gradient in a joint pair, leave zeros.
    made.gaps = filled < made.elements
    return made


def in_order(
    made: Placed,
) -> tuple[list[Rectangle], list[Item], list[tuple[int, int]], tuple[int, int]]:
    """Rectangles and items of all parameters, the span of each one's items, and where kinds end.

    Parameters that can be read eight numbers at a time come first, and columns last. The last
    result is the number of items of the former, and of all but the columns.
    """
    kinds = [
        2 if share == COLUMN else int(not aligned([r for r, _ in mine]))
        for mine, share in zip(made.of_parameter, made.shapes, strict=True)
    ]
    rectangles: list[Rectangle] = []
    items: list[Item] = []
    spans, ends = [(0, 0)] * len(kinds), [0, 0, 0]
    for i in sorted(range(len(kinds)), key=kinds.__getitem__):
        begin = len(items)
        for rectangle, at in made.of_parameter[i]:
            share = made.shapes[i]
            items += items_of(rectangle, number=len(rectangles), place=at, share=share)
            rectangles.append(rectangle)
        spans[i] = (begin, len(items))
        ends[kinds[i]] = len(items)
    return rectangles, items, spans, (ends[0], max(ends[:2]))


def aligned(rectangles: Sequence[Rectangle]) -> bool:
    """Whether rows start and end at multiples of eight numbers."""
    return all(value % 8 == 0 for rectangle in rectangles for value in rectangle[1:])


def as_table(rows: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of integers on the device, sent without waiting for the copy."""
    table = torch.tensor(rows, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
