"""Tables of blocks: every element of a parameter exactly once, in the order of `Tile.grid`."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rootfree.kernels import axis_products
from rootfree.kernels.block_table import (
    COLS,
    COLUMN,
    ROWS,
    SHARE,
    Rectangle,
    aligned,
    in_order,
    is_column,
    items_in,
    items_of,
    placed,
    rectangles_of,
    with_room,
)
from rootfree.layout.joint import JointPairs
from rootfree.layout.tiles import Piece, Tile, pieces_of, tiles_of


def elements(rectangle: Rectangle):
    """Positions in the parameter and in the stack of what the kernels do for a rectangle."""
    share = COLUMN if is_column(rectangle) else SHARE
    for _, row, col, _ in items_of(rectangle, number=0, place=0, share=share):
        for r in range(row, row + share[0]):
            for c in range(col, min(col + share[1], rectangle.columns)):
                if r * rectangle.columns + c < rectangle.elements:
                    here = rectangle.offset + r * rectangle.distance + c
                    yield here, rectangle.stack + r * rectangle.pitch + c


def assert_covers(tiles: list[Tile], matrix: torch.Tensor, pieces) -> None:
    """Each piece of `pieces(tile)` comes with the numbers that its parameter has in `matrix`."""
    seen = torch.zeros(matrix.numel(), dtype=torch.int64)
    start = 5  # of the tile in the stack
    for tile in tiles:
        stack = torch.full((tile.blocks * tile.elements,), -1)
        for piece, numbers in pieces(tile):
            found = rectangles_of(piece, parameter=3, stack=start, block=tile.elements)
            for block, rectangle in found:
                assert rectangle.parameter == 3
                count = 0
                for here, there in elements(rectangle):
                    number, place = numbers.view(-1)[here], there - start
                    assert place // tile.elements == block
                    assert stack[place] == -1
                    stack[place] = number
                    seen[number] += 1
                    count += 1
                assert count == rectangle.elements
        assert torch.equal(stack, tile.grid(matrix).reshape(-1))
    assert (seen == 1).all()


def assert_covers_parameter(axes, blocks) -> None:
    matrix = torch.arange(math.prod(axes)).view(axes)
    tiles = tiles_of(tuple(axes), blocks)
    assert_covers(tiles, matrix, lambda tile: [(pieces_of(matrix, tile), matrix)])


sizes = st.integers(1, 9)


@settings(max_examples=40)
@given(data=st.data(), axes=st.lists(sizes, min_size=1, max_size=4))
def test_every_element_once_in_the_order_of_the_grid(data, axes):
    blocks = [data.draw(st.one_of(st.none(), st.integers(1, d)), label="block") for d in axes]
    assert_covers_parameter(axes, blocks)


@settings(max_examples=40)
@given(
    shape=st.lists(sizes, min_size=2, max_size=3),
    block=st.one_of(st.none(), st.integers(1, 20)),
    flat=st.booleans(),
)
def test_every_element_of_a_weight_with_its_bias_once(shape, block, flat):
    """[W b] cut as a matrix, or (`flat`) as one vector."""
    outputs, inputs = shape[0], math.prod(shape[1:])
    weight, bias = torch.empty(shape), torch.empty(outputs)
    matrix = torch.arange(outputs * (inputs + 1)).view(outputs, inputs + 1)
    numbers = {weight: matrix[:, :-1].contiguous(), bias: matrix[:, -1].contiguous()}
    pairs = JointPairs([(weight, bias)])
    axes = (matrix.numel(),) if flat else tuple(matrix.shape)
    assert_covers(
        tiles_of(axes, [block] * len(axes)),
        matrix,
        lambda tile: [(piece, numbers[piece.p]) for piece in pairs.pieces_of(weight, tile)],
    )


@settings(max_examples=40)
@given(
    shape=st.lists(sizes, min_size=2, max_size=3),
    block=st.one_of(st.none(), st.integers(1, 20)),
    joint=st.booleans(),
    extra=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_a_piece_in_blocks_with_more_room(shape, block, joint, extra):
    """Its elements are where a padded stack has them."""
    weight, bias = torch.empty(shape), torch.empty(shape[0])
    pairs = JointPairs([(weight, bias)] if joint else [])
    for tile in tiles_of(axes := pairs.shape_of(weight), [block] * len(axes)):
        rooms = [d + more for d, more in zip(tile.sizes, extra, strict=False)]
        stack = torch.arange(tile.blocks * tile.elements).view(tile.blocks, *tile.sizes)
        roomy = axis_products.padded(stack, rooms)
        for piece in pairs.pieces_of(weight, tile):
            moved = with_room(piece, tile.sizes, rooms)
            views = [
                t.as_strided((*each.counts, *each.sizes), each.stack_strides, each.stack_offset)
                for t, each in ((stack, piece), (roomy, moved))
            ]
            assert torch.equal(*views)


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
    assert_covers_parameter(axes, blocks)


@given(
    columns=st.integers(1, 3 * COLS),
    count=st.integers(1, 10 * COLS),
    place=st.integers(0, 1000),
    share=st.sampled_from([SHARE, COLUMN]),
)
def test_places_of_sums_follow_each_other(columns, count, place, share):
    rectangle = Rectangle(0, 0, columns, columns, count, 0, columns)
    items = items_of(rectangle, number=3, place=place, share=share)
    assert [item.place for item in items] == list(range(place, place + items_in(rectangle, share)))
    assert {item.rectangle for item in items} == {3}


def test_rows_too_far_apart_for_32_bits_go_one_by_one():
    """Inside a share the kernels count in int32: 3·2³⁰ would be too far."""
    tile = Tile((4, 2**30), (0, 0), (1, 2), (4, 2**29))
    piece: Piece = pieces_of(torch.empty(0), tile)
    found = list(rectangles_of(piece, parameter=0, stack=0, block=tile.elements))
    first, second = ([r for number, r in found if number == block] for block in (0, 1))
    assert [r.offset for r in first] == [i * 2**30 for i in range(4)]
    assert [r.offset for r in second] == [2**29 + i * 2**30 for i in range(4)]
    assert all(r[2:5] == (COLS, COLS, 2**29) and r.pitch == COLS for r in first + second)
    assert [r.stack for r in first + second] == [i * 2**29 for i in range(8)]


def share_of(tile: Tile, pieces: list[Piece]) -> SimpleNamespace:
    bucket = SimpleNamespace(plan=SimpleNamespace(kernel=None))
    slot = SimpleNamespace(tile=tile, pieces=pieces)
    return SimpleNamespace(blocks=tile.blocks, slots=[slot], bucket=bucket)


def test_programs_have_columns_where_a_parameter_has_nothing_else():
    weight, bias = torch.empty(12, 4), torch.empty(12)
    pairs = JointPairs([(weight, bias)])
    cut = torch.empty(8, 3)  # into blocks of two columns, and of one
    tiles = [(weight, tile) for tile in tiles_of((12, 5), [6, None])]
    tiles += [(cut, tile) for tile in tiles_of((8, 3), [None, 2])]
    shares = [share_of(tile, pairs.pieces_of(p, tile)) for p, tile in tiles]
    made = placed(shares, {bias: 0, cut: 1, weight: 2})
    assert made.shapes == [COLUMN, SHARE, SHARE]
    rectangles, items, spans, (regular, wide) = in_order(made)
    assert (regular, wide) == (0, spans[2][1])
    assert spans[0] == (wide, len(items)) == (wide, wide + 2)  # the last, one item a block
    assert {rectangles[item.rectangle].parameter for item in items[wide:]} == {0}
    assert sorted(item.place for item in items) == [*range(made.sums)]
    assert not is_column(Rectangle(0, 0, 2**19, 1, 8, 0, 1))  # too far for 32 bits
    assert is_column(Rectangle(0, 0, 2**18, 1, 8, 0, 2**18))


def test_alignment_is_that_of_eight_numbers():
    even = (0, 8, 16, 24, 32, 40, 48)
    assert aligned([Rectangle(*even)])
    for i in range(1, 7):
        assert not aligned([Rectangle(*(v + (n == i) for n, v in enumerate(even)))])
