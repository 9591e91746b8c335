"""Where every block lies, in its parameter and in the stack: the tables of triton_blocks.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rootfree.blocks import Tile

# A program's share of a block. Blocks that are one piece of memory are cut into rows of COLS.
ROWS, COLS, WARPS = 4, 1024, 8

Entry = tuple[int, int, int, int, int, int]
Item = tuple[int, int, int, int]


def entries_of(tile: Tile, *, which: int, stack: int) -> list[list[Entry]]:
    """Per block of the tile, the rectangles that it is made of in a contiguous parameter.

    Entry: (parameter, offset, distance of rows, columns, elements, offset in the stack).
    """
    strides = [math.prod(tile.view[n + 1 :]) for n in range(len(tile.view))]
    levels = _levels(tile.sizes, strides)
    outer, rows, columns = levels[:-2], *([(1, 0), *levels][-2:])
    if rows[1] * ROWS >= 2**31:  # the kernels count in int32 inside a share: row by row
        outer, rows = levels[:-1], (1, 0)
    (row_count, distance), (column_count, _) = rows, columns
    elements = row_count * column_count
    blocks = []
    for position in product(*(range(count) for count in tile.counts)):
        start = sum(
            (first + i * size) * stride
            for first, i, size, stride in zip(
                tile.starts, position, tile.sizes, strides, strict=True
            )
        )
        rectangles = []
        for index in product(*(range(size) for size, _ in outer)):
            offset = start + sum(i * s for i, (_, s) in zip(index, outer, strict=True))
            shape = (COLS, COLS) if row_count == 1 else (distance, column_count)
            rectangles.append((which, offset, *shape, elements, stack))
            stack += elements
        blocks.append(rectangles)
    return blocks


def _levels(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) from the outermost in, neighbours that lie without a gap merged."""
    levels = [(sizes[-1], strides[-1])]
    for size, stride in zip(reversed(sizes[:-1]), reversed(strides[:-1]), strict=True):
        inner_size, inner_stride = levels[0]
        if stride == inner_size * inner_stride:
            levels[0] = (size * inner_size, inner_stride)
        else:
            levels.insert(0, (size, stride))
    return levels


def items_of(entry: Entry, *, number: int, place: int) -> list[Item]:
    """The shares of an entry: (entry, first row, first column, place of the partial sum)."""
    _, _, _, columns, elements, _ = entry
    rows = -(-elements // columns)
    starts = product(range(0, rows, ROWS), range(0, columns, COLS))
    return [(number, row, col, place + i) for i, (row, col) in enumerate(starts)]


def shares_of(entry: Entry) -> int:
    """How many items an entry has."""
    _, _, _, columns, elements, _ = entry
    return -(-elements // (columns * ROWS)) * -(-columns // COLS)


def aligned(entries: Sequence[Entry]) -> bool:
    """Whether rows start and end at multiples of eight numbers."""
    return all(
        value % 8 == 0
        for _, offset, distance, columns, elements, stack in entries
        for value in (offset, distance, columns, elements, stack)
    )


def as_table(rows: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of integers on the device, sent without waiting for it."""
    table = torch.tensor(rows, dtype=dtype, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
