"""Where every block lies, in its parameter and in the stack: the tables of triton_blocks.py."""

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


@dataclass
class Placed:
    """Where the blocks of shares are in a stack, and their sums."""

    #: of each share: first element, sizes in memory, first sum, sums a block
    shares: list[tuple[int, tuple[int, ...], int, int]]
    of_parameter: list[list[tuple[Rectangle, int]]]  # its rectangles, with the places of their sums
    elements: int = 0
    sums: int = 0
    ragged: bool = False  # whether blocks have fewer sums than others of their share
    gaps: bool = False  # whether there are elements that no parameter has


def placed(shares: Sequence[Share], where: Mapping[Tensor, int]) -> Placed:
    """Share after share; `where`: positions of the parameters that have gradients."""
    made, filled = Placed([], [[] for _ in where]), 0
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
                    found = rectangles_of(piece, parameter=i, stack=start, block=elements)
                    for number, rectangle in found:
                        blocks[first + number].append(rectangle)
                        filled += rectangle.elements
            first += slot.tile.blocks
            start += slot.tile.blocks * elements
        # A block inside a larger parameter has rows of its own, a whole parameter has none.
        counts = [sum(map(items_in, block)) for block in blocks]
        most = max(counts)
        made.ragged = made.ragged or min(counts) < most
        made.shares.append((made.elements, rooms, made.sums, most))
        for block in blocks:
            at = made.sums
            for rectangle in block:
                made.of_parameter[rectangle.parameter].append((rectangle, at))
                at += items_in(rectangle)
            made.sums += most
        filled += -start % 64
        made.elements = start + -start % 64  # where the matrix units like it
    # Parameters without a gradient in a joint pair, and padding, leave zeros.
    made.gaps = filled < made.elements
    return made


def in_order(
    of_parameter: Sequence[Sequence[tuple[Rectangle, int]]],
) -> tuple[list[Rectangle], list[Item], list[tuple[int, int]], int]:
    """Rectangles and items of all parameters, first and last item of each, and the regular ones.

    Given are the rectangles of each parameter with the places of their sums. Those that can be read
    eight numbers at a time come first: the last result is how many items they have.
    """
    eights = [aligned([r for r, _ in mine]) for mine in of_parameter]
    rectangles: list[Rectangle] = []
    items: list[Item] = []
    spans, regular = [(0, 0)] * len(of_parameter), 0
    for i in sorted(range(len(of_parameter)), key=lambda i: not eights[i]):
        begin = len(items)
        for rectangle, at in of_parameter[i]:
            items += items_of(rectangle, number=len(rectangles), place=at)
            rectangles.append(rectangle)
        spans[i] = (begin, len(items))
        if eights[i]:
            regular = len(items)
    return rectangles, items, spans, regular


def aligned(rectangles: Sequence[Rectangle]) -> bool:
    """Whether rows start and end at multiples of eight numbers."""
    return all(value % 8 == 0 for rectangle in rectangles for value in rectangle[1:])


def as_table(rows: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of integers on the device, sent without waiting for it."""
    table = torch.tensor(rows, dtype=dtype, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
