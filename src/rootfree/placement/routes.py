"""Which rank sends what to which.

A tensor is a list of (rank, box): which rank has which part. A route says what each rank must send
so that every rank gets the boxes that it wants. Boxes are intersected once, when the route is made.
Empty and uneven shards are no special case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootfree.placement.boxes import Box, Overlaps, meet, size_of

Key = Any
Places = Sequence[tuple[int, Box]]


@dataclass(frozen=True)
class Leg:
    """Elements that are sent, received or kept: their box, and the part of it."""

    key: Key
    box: Box
    cut: Box


@dataclass(frozen=True)
class Route:
    """What this rank sends to each rank, receives from each, and keeps."""

    sent: list[list[Leg]]
    received: list[list[Leg]]
    kept: list[tuple[Leg, Leg]]
    holes: list[tuple[Key, Box]]  # boxes wanted here with elements that no rank has


def make_route(
    sources: Mapping[Key, Places], targets: Mapping[Key, Places], *, me: int, world: int
) -> Route:
    """The route by which every target box gets its elements from a rank that has them.

    Of several such ranks, the target itself comes first, then the one with the nearest number.
    """
    sent: list[list[Leg]] = [[] for _ in range(world)]
    received: list[list[Leg]] = [[] for _ in range(world)]
    kept, holes = [], []
    for key, wanted in targets.items():
        having = sources.get(key, ())
        everywhere = Overlaps(having)
        # Without copies, only this rank's own boxes matter for what it sends.
        once = len({box for _, box in having}) == len(having)
        mine = Overlaps([place for place in having if place[0] == me]) if once else everywhere
        for rank, box in wanted:
            candidates = (everywhere if rank == me else mine).of(box)
            missing, taken = size_of(box), list[Box]()
            for source, held in sorted(candidates, key=lambda at: _distance(at[0], rank)):
                cut = meet(held, box)
                if cut is None or any(meet(cut, other) for other in taken):
                    continue
                taken.append(cut)
                missing -= size_of(cut)
                if source == rank == me:
                    kept.append((Leg(key, held, cut), Leg(key, box, cut)))
                elif rank == me:
                    received[source].append(Leg(key, box, cut))
                elif source == me:
                    sent[rank].append(Leg(key, held, cut))
                if missing == 0:
                    break
            if missing and rank == me:
                holes.append((key, box))
    return Route(sent, received, kept, holes)


def _distance(source: int, rank: int) -> tuple[int, int]:
    return abs(source - rank), source
