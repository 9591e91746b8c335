"""Boxes of shards in the view that blocks are cut in."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rootfree.layout.tiles import axes_of, tiles_of
from rootfree.placement.boxes import (
    Overlaps,
    block_boxes,
    meet,
    part,
    shape_of,
    view_boxes,
    whole,
)


@st.composite
def boxes(draw):
    """A shape, a box in it, and a view that merges axes as the methods do, or all."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    box = tuple(tuple(sorted(draw(st.tuples(st.integers(0, d), st.integers(0, d))))) for d in shape)
    view = draw(st.sampled_from([axes_of(shape, merge_up_to=n) for n in (None, 6, 10**6)]))
    flat = (torch.Size(shape).numel(),)
    return shape, box, draw(st.sampled_from([view, flat]))


@given(boxes())
def test_boxes_of_the_view_have_the_elements_of_the_box(case):
    shape, box, view = case
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    mine = part(numbers, whole(shape), box)
    found = view_boxes(box, shape, view)
    for there, sub in found:
        of_view = part(numbers.view(view), whole(view), there)
        assert torch.equal(of_view, part(mine, box, sub).reshape(shape_of(there)))
    seen = [part(numbers.view(view), whole(view), there).flatten() for there, _ in found]
    together = torch.cat([*seen, torch.empty(0, dtype=torch.int64)])
    assert torch.equal(together.sort().values, mine.flatten())


def test_what_is_not_cut_inside_merged_axes_is_one_box():
    """A convolution sharded by outputs or inputs, a vector, a scalar."""
    assert len(view_boxes(((2, 4), (0, 3), (0, 7), (0, 7)), (8, 3, 7, 7), (8, 147))) == 1
    assert len(view_boxes(((0, 8), (1, 3), (0, 7), (0, 7)), (8, 3, 7, 7), (8, 147))) == 1
    assert view_boxes(((3, 3),), (5,), (5,)) == []
    assert view_boxes((), (), (1,)) == [(((0, 1),), ())]


@given(st.data())
def test_overlaps_are_found(data):
    edge = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: tuple(sorted(pair)))
    box = st.tuples(edge, edge)
    places = data.draw(st.lists(st.tuples(st.integers(0, 3), box), max_size=8))
    wanted = data.draw(box)
    found = Overlaps(places).of(wanted)
    needed = [place for place in places if meet(place[1], wanted)]
    assert all(place in found for place in needed)
    assert len(found) <= len(places)


def test_only_what_is_near_is_looked_at():
    places = [(rank, ((8 * rank, 8 * rank + 8), (0, 4))) for rank in range(64)]
    assert Overlaps(places).of(((12, 25), (0, 4))) == places[1:4]
    assert Overlaps(places).of(((600, 700), (0, 4))) == []


def test_blocks_are_in_the_order_in_which_they_are_stacked():
    for tile in tiles_of((10, 7), (4, 3)):
        numbers = torch.arange(70).view(10, 7)
        stack = tile.grid(numbers).reshape(tile.blocks, *tile.sizes)
        for block, box in zip(stack, block_boxes(tile), strict=True):
            assert torch.equal(block, part(numbers, whole((10, 7)), box))
