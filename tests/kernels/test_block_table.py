"""Tables of blocks: every element of a parameter exactly once, in the order of `Tile.grid`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rootfree.layout.tiles import Tile, tiles_of
from rootfree.kernels.block_table import COLS, ROWS, aligned, entries_of, items_of, shares_of


def elements(entry):
    """Positions in the parameter and in the stack of what a kernel does for an entry."""
    _, offset, distance, columns, count, stack = entry
    for _, row, col, _ in items_of(entry, number=0, place=0):
        for r in range(row, row + ROWS):
            for c in range(col, min(col + COLS, columns)):
                if r * columns + c < count:
                    yield offset + r * distance + c, stack + r * columns + c


def assert_covers(tiles: list[Tile], numel: int) -> None:
    seen = torch.zeros(numel, dtype=torch.int64)
    for tile in tiles:
        stack = torch.full((tile.blocks * tile.elements,), -1)
        for rectangles in entries_of(tile, which=0, stack=0):
            for entry in rectangles:
                for here, there in elements(entry):
                    seen[here] += 1
                    assert stack[there] == -1
                    stack[there] = here
        expected = tile.grid(torch.arange(numel).view(tile.view)).reshape(-1)
        assert torch.equal(stack, expected)
    assert (seen == 1).all()


sizes = st.integers(1, 9)


@settings(max_examples=40)
@given(data=st.data(), axes=st.lists(sizes, min_size=1, max_size=4))
def test_every_element_once_in_the_order_of_the_grid(data, axes):
    blocks = [data.draw(st.one_of(st.none(), st.integers(1, d)), label="block") for d in axes]
    assert_covers(tiles_of(tuple(axes), blocks), math.prod(axes))


@pytest.mark.parametrize(
    ("axes", "blocks"),
    [
        ((COLS * ROWS + 5,), [None]),  # one axis, more than a share
        ((3, COLS + 7), [2, None]),
        ((2, 2 * COLS + 2), [None, COLS + 1]),  # rows longer than a share is wide
        ((2 * ROWS + 1, 6), [None, 3]),
        ((1,), [None]),
    ],
)
def test_shares_of_long_rows(axes, blocks):
    assert_covers(tiles_of(axes, blocks), math.prod(axes))


@given(
    columns=st.integers(1, 3 * COLS), count=st.integers(1, 10 * COLS), place=st.integers(0, 1000)
)
def test_places_of_sums_follow_each_other(columns, count, place):
    entry = (0, 0, columns, columns, count, 0)
    items = items_of(entry, number=3, place=place)
    assert [item[3] for item in items] == list(range(place, place + shares_of(entry)))
    assert {item[0] for item in items} == {3}


def test_rows_too_far_apart_for_32_bits_go_one_by_one():
    """Inside a share the kernels count in int32: 3·2³⁰ would be too far."""
    tile = Tile((4, 2**30), (0, 0), (1, 2), (4, 2**29))
    (first, second) = entries_of(tile, which=0, stack=0)
    assert [entry[1] for entry in first] == [i * 2**30 for i in range(4)]
    assert [entry[1] for entry in second] == [2**29 + i * 2**30 for i in range(4)]
    assert all(entry[2:5] == (COLS, COLS, 2**29) for entry in first)
    assert [entry[5] for entry in first + second] == [i * 2**29 for i in range(8)]


def test_alignment_is_that_of_eight_numbers():
    assert aligned([(0, 8, 16, 24, 32, 40)])
    for i in range(1, 6):
        assert not aligned([tuple(v + (n == i) for n, v in enumerate((0, 8, 16, 24, 32, 40)))])
