"""Rounds of blocks: all of them once, every owner's in order, and not too much at a time."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from rootfree.layout.structured import structured_tiles
from rootfree.placement.boxes import block_boxes, size_of
from rootfree.placement.homes import Home
from rootfree.placement.rounds import divided

DTYPES = (torch.float32, torch.bfloat16)


@st.composite
def homes(draw):
    """Parameters with blocks of a few shapes, each block with any of three owners."""
    found = []
    for shape in draw(st.lists(st.sampled_from([(8, 8), (12, 8), (5,), (20, 3)]), min_size=1)):
        cut = structured_tiles(shape, structure="auto", block_size=8)
        owners = [
            draw(st.lists(st.integers(0, 2), min_size=tile.blocks, max_size=tile.blocks))
            for tile, _ in cut
        ]
        ranks = SimpleNamespace(me=0, world=3)
        found.append(Home(ranks, shape, cut, [], [], at_owner=False, owners=owners))
    return found


@given(homes(), st.sampled_from([1, 100, 300, 10**6]), st.data())
def test_every_block_travels_once_in_its_owners_order(found, limit, data):
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in found]
    rounds = divided(found, dtypes, limit)
    seen = [(i, box) for _, owned in rounds for i, places in owned.items() for _, box in places]
    wanted = [(i, b) for i, home in enumerate(found) for t, _ in home.cut for b in block_boxes(t)]
    assert sorted(seen) == sorted(wanted)
    largest = max(4 * size_of(box) for _, box in wanted)
    for dtype, owned in rounds:
        assert {dtypes[i] for i in owned} == {dtype}
        for owner in range(3):
            mine = [box for places in owned.values() for who, box in places if who == owner]
            assert sum(dtype.itemsize * size_of(box) for box in mine) < limit + largest
    if limit == 10**6:
        assert len(rounds) == len({*dtypes})
