"""Routes: everybody gets what it wants, from one who has it, and nothing is sent in vain."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rootfree.placement.boxes import chunk, part, size_of, whole
from rootfree.placement.exchange import piece_of, stand_in
from rootfree.placement.owners import SLACK, Block, Holdings, assign, flops
from rootfree.placement.routes import make_route
from rootfree.structures import Dense, Diagonal

SHAPE = (12, 10)


@st.composite
def layouts(draw, world):
    """Who has which box: rows or columns cut anywhere, to any ranks, perhaps in several copies."""
    axis = draw(st.integers(0, 1))
    cuts = sorted(draw(st.sets(st.integers(1, SHAPE[axis] - 1), max_size=4)))
    edges = [0, *cuts, SHAPE[axis]]
    found = []
    for start, stop in pairwise(edges):
        box = list(whole(SHAPE))
        box[axis] = (start, stop)
        ranks = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=3, unique=True))
        found += [(rank, tuple(box)) for rank in ranks]
    return found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_everybody_gets_what_it_wants(data):
    world = data.draw(st.integers(1, 4))
    sources, targets = data.draw(layouts(world)), data.draw(layouts(world))
    numbers = torch.arange(120.0).view(SHAPE)
    routes = [make_route({"x": sources}, {"x": targets}, me=r, world=world) for r in range(world)]
    for me, route in enumerate(routes):
        assert route.holes == []
        for other in range(world):  # both ends agree on what travels, and in which order
            legs = route.sent[other], routes[other].received[me]
            assert [leg.cut for leg in legs[0]] == [leg.cut for leg in legs[1]]
            for leg in legs[0]:  # who sends it has it
                assert (me, leg.box) in sources
                assert (other, legs[1][legs[0].index(leg)].box) in targets
        want = {box: torch.zeros(SHAPE) for rank, box in targets if rank == me}
        for leg in [leg for legs in route.received for leg in legs] + [b for _, b in route.kept]:
            there = part(want[leg.box], whole(SHAPE), leg.cut)
            assert not there.any()  # nothing comes twice
            there.copy_(part(numbers, whole(SHAPE), leg.cut) + 1)
        for box, got in want.items():
            assert torch.equal(part(got, whole(SHAPE), box), part(numbers, whole(SHAPE), box) + 1)
        assert route.sent[me] == route.received[me] == []  # what is here is not sent


def test_what_nobody_has_is_a_hole():
    half, rest = ((0, 6), (0, 10)), ((6, 12), (0, 10))
    route = make_route({0: [(0, half)]}, {0: [(1, whole(SHAPE))]}, me=1, world=2)
    assert route.holes == [(0, whole(SHAPE))]
    assert sum(size_of(leg.cut) for leg in route.received[0]) == size_of(half)
    assert make_route({}, {0: [(0, rest)]}, me=0, world=1).holes == [(0, rest)]


@given(st.data())
def test_a_part_of_a_piece_is_what_narrowing_gives(data):
    """Of a tensor that begins in the middle of its memory, and of a view with its axes swapped."""
    numbers = torch.arange(121.0)[1:].view(SHAPE)
    edges = st.integers(0, 10).flatmap(
        lambda start: st.tuples(st.just(start), st.integers(start, 10))
    )
    swapped = data.draw(st.booleans())
    view, here = (stand_in(SHAPE).t(), numbers.t()) if swapped else (stand_in(SHAPE), numbers)
    outer = whole(view.shape)
    inner = tuple(data.draw(edges) for _ in SHAPE)
    found = piece_of(0, view).part(outer, inner).of([numbers])
    assert torch.equal(found, part(here, outer, inner))


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(d, count):
    edges = [chunk(d, number, count) for number in range(count)]
    expected = [each.tolist() for each in torch.arange(d).chunk(count)] if d else []
    assert [list(range(*each)) for each in edges if each[0] < each[1]] == expected


def block(n, cost, box=((0, 4), (0, 4))):
    return Block(n, 0, 0, box, cost)


def test_the_holder_of_most_of_a_block_owns_it():
    held = {0: [(0, ((0, 1), (0, 4))), (1, ((1, 4), (0, 4)))], 1: [(0, ((0, 4), (0, 4)))]}
    owners, load = assign([block(0, 2.0), block(1, 2.0)], Holdings(held), [0.0, 0.0])
    assert owners == [1, 0]
    assert load == [2.0, 2.0]


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=40), st.integers(1, 8))
def test_loads_are_even(costs, world):
    """Whatever is held where: no load is far above the mean, but for a block's own cost."""
    held = {n: [(0, ((0, 4), (0, 4)))] for n in range(len(costs))}  # rank 0 has everything
    blocks = [block(n, cost) for n, cost in enumerate(costs)]
    owners, load = assign(blocks, Holdings(held), [0.0] * world)
    by_owner = [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
        for rank in range(world)
    ]
    torch.testing.assert_close(torch.tensor(load), torch.tensor(by_owner, dtype=torch.float32))
    mean = sum(costs) / world
    assert max(load) <= max(SLACK * mean, mean + max(costs)) * (1 + 1e-9)


def test_the_cost_of_a_block_grows_with_its_dense_factors():
    dense, thin = (
        flops((64, 64), (Dense(64), Dense(64))),
        flops((64, 64), (Dense(64), Diagonal(64))),
    )
    assert flops((64, 64), (Diagonal(64), Diagonal(64))) == 10 * 64 * 64
    assert 1.8 * thin < dense < 2 * thin
