"""Moving boxes between ranks.

Tensors are lists of (rank, box): who has which part. A route says what each rank must send so that
everybody gets the boxes that it wants; boxes are intersected once, when the route is made. Empty
and uneven shards are no special case.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rootfree.placement.boxes import Box, meet, part, shape_of, size_of
from rootfree.placement.processes import exchange_device

Key = Any
Places = Sequence[tuple[int, Box]]
Tensors = Mapping[tuple[Key, Box], Tensor]


@dataclass(frozen=True)
class Leg:
    """Elements of one box that go somewhere: the box that holds them, and which they are."""

    key: Key
    box: Box
    cut: Box


@dataclass(frozen=True)
class Route:
    """What this rank sends to each rank, gets from each, and keeps."""

    sent: list[list[Leg]]
    received: list[list[Leg]]
    kept: list[tuple[Leg, Leg]]
    holes: list[tuple[Key, Box]]  # boxes here with elements that nobody has


def make_route(
    sources: Mapping[Key, Places], targets: Mapping[Key, Places], *, me: int, world: int
) -> Route:
    """The route by which every target box gets its elements from somebody who has them.

    Of several that have them, a rank itself is preferred, then the one with the nearest number.
    """
    sent: list[list[Leg]] = [[] for _ in range(world)]
    received: list[list[Leg]] = [[] for _ in range(world)]
    kept, holes = [], []
    for key, wanted in targets.items():
        having = sources.get(key, ())
        mine = [place for place in having if place[0] == me]
        once = _disjoint(having)
        for rank, box in wanted:
            # Where nothing is there twice, what others send each other is no business of ours.
            candidates = mine if once and rank != me else having
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


def _disjoint(places: Places) -> bool:
    """Whether no element is in two boxes, given that boxes are equal or have nothing in common."""
    return len({box for _, box in places}) == len(places)


def move(
    route: Route, have: Tensors, want: Tensors, *, dtype: torch.dtype, device: torch.device,
    group: Any, sent: MutableMapping[str, int], what: str,
) -> None:  # fmt: skip
    """Fill the wanted boxes, all in one exchange of numbers of this dtype.  Changes `want`, `sent`.

    `sent` counts bytes that leave this rank, by `what` they are.
    """
    for key, box in route.holes:
        want[key, box].zero_()
    outgoing = [leg for legs in route.sent for leg in legs]
    incoming = [leg for legs in route.received for leg in legs]
    out = _buffer(sum(size_of(leg.cut) for leg in outgoing), dtype, device)
    for leg, space in zip(outgoing, _split(out, outgoing), strict=True):
        space.copy_(part(have[leg.key, leg.box], leg.box, leg.cut))
    come = _buffer(sum(size_of(leg.cut) for leg in incoming), dtype, device)
    sizes = [
        [sum(size_of(leg.cut) for leg in legs) for legs in way]
        for way in (route.received, route.sent)
    ]
    sent[what] = sent.get(what, 0) + out.numel() * out.element_size()
    work = _all_to_all(come, out, sizes, group)
    for source, target in route.kept:  # meanwhile
        part(want[target.key, target.box], target.box, target.cut).copy_(
            part(have[source.key, source.box], source.box, source.cut)
        )
    come = work()
    for leg, space in zip(incoming, _split(come, incoming), strict=True):
        part(want[leg.key, leg.box], leg.box, leg.cut).copy_(space)


def _buffer(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _split(buffer: Tensor, legs: Sequence[Leg]) -> list[Tensor]:
    parts = buffer.split([size_of(leg.cut) for leg in legs]) if legs else ()
    return [space.view(shape_of(leg.cut)) for space, leg in zip(parts, legs, strict=True)]


def _all_to_all(come: Tensor, out: Tensor, sizes: list[list[int]], group: Any) -> Any:
    """Start the exchange; the function returned waits for it and gives what came."""
    if len(sizes[0]) == 1:
        return lambda: come
    device = exchange_device(group, out.device)
    there, here = (out, come) if device == out.device else (
        out.to(device), torch.empty_like(come, device=device)
    )  # fmt: skip
    # As bytes: not every backend knows every dtype.
    width = out.element_size()
    bytes_in, bytes_out = ([n * width for n in each] for each in sizes)
    work = torch.distributed.all_to_all_single(
        here.view(torch.uint8), there.view(torch.uint8), bytes_in, bytes_out, group=group,
        async_op=True,
    )  # fmt: skip

    def wait() -> Tensor:
        work.wait()
        return here.to(come.device)

    return wait
