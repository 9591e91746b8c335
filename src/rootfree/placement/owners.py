"""Assigns blocks to ranks: the owner of a block keeps its factors and computes its directions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from rootfree.layout.tiles import Tile
from rootfree.placement.boxes import Box, Overlaps, block_boxes, meet, size_of
from rootfree.structures import Diagonal, Structure

Cut = Sequence[tuple[Tile, tuple[Structure, ...]]]  # the tiles of a parameter

# The rank that holds most of a block owns it, unless its load would exceed this times the mean.
SLACK = 1.05
# Steps per refresh, as by default. A constant: owners must not depend on a schedule.
INTERVAL = 2


class Block(NamedTuple):
    """A block of a parameter: position of the parameter, tile, number in the tile."""

    parameter: int
    tile: int
    number: int
    box: Box  # in the view of the parameter
    cost: float


Held = Sequence[tuple[int, Box]]  # (rank, box) of every part of a parameter


def flops(sizes: Sequence[int], structures: Sequence[Structure]) -> float:
    """The approximate cost of a step on a block.

    A dense factor of size d takes two products with the block for the direction. A refresh takes
    two more and some products of d×d matrices.
    """
    elements = math.prod(sizes)
    dense = [s.d for s in structures if not isinstance(s, Diagonal)]
    direction = sum(4 * elements * d for d in dense)
    refresh = sum(4 * elements * d + 8 * d**3 for d in dense)
    return 10 * elements + direction + refresh / INTERVAL


def blocks_of(cuts: Sequence[Cut]) -> list[Block]:
    """The blocks of parameters that are cut like this."""
    return [
        Block(i, t, n, box, cost)
        for i, cut in enumerate(cuts)
        for t, (tile, structures) in enumerate(cut)
        for cost in [flops(tile.sizes, structures)]
        for n, box in enumerate(block_boxes(tile))
    ]


class Holdings:
    """How many elements of a block each rank holds; equal layers are computed once."""

    def __init__(self, held: Mapping[int, Held]) -> None:
        alike: dict[Any, tuple[Overlaps, dict[Box, dict[int, int]]]] = {}
        self._of = {
            parameter: alike.setdefault(tuple(places), (Overlaps(places), {}))
            for parameter, places in held.items()
        }

    def shares(self, block: Block) -> dict[int, int]:
        """The number of elements by rank, for ranks that hold any."""
        overlaps, known = self._of[block.parameter]
        if block.box not in known:
            shares: dict[int, int] = defaultdict(int)
            for rank, other in overlaps.of(block.box):
                common = meet(other, block.box)
                if common is not None:
                    shares[rank] += size_of(common)
            known[block.box] = dict(sorted(shares.items()))
        return known[block.box]


def assign(
    blocks: Sequence[Block], holdings: Holdings, load: Sequence[float]
) -> tuple[list[int], list[float]]:
    """The owner of every block, and the load of every rank including the given one.

    Costly blocks come first. Each goes to the rank that holds most of it, or else to the one with
    the least load. The result is the same on every rank.
    """
    load, owners = list(load), [0] * len(blocks)
    mean = (sum(load) + sum(block.cost for block in blocks)) / len(load)
    waiting = [(each, rank) for rank, each in enumerate(load)]  # the least loaded rank first
    heapify(waiting)
    for n in sorted(range(len(blocks)), key=lambda n: (-blocks[n].cost, n)):
        cost, shares = blocks[n].cost, holdings.shares(blocks[n])
        while waiting[0][0] != load[waiting[0][1]]:  # outdated: its load has grown since
            heappop(waiting)
        idle = waiting[0][1]
        most = max(shares.values())
        if shares.get(idle) == most:
            owner = idle
        else:
            having = [rank for rank, share in shares.items() if share == most]
            nearest = min(having, key=load.__getitem__)
            limit = max(SLACK * mean, load[idle] + cost)
            owner = nearest if load[nearest] + cost <= limit else idle
        load[owner] += cost
        heappush(waiting, (load[owner], owner))
        owners[n] = owner
    return owners, load
