"""What a placement costs each rank, from shapes alone: without tensors or a process group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rootfree.layout.structured import structured_tiles
from rootfree.placement.boxes import Box, chunk, in_view, size_of, whole
from rootfree.placement.owners import Cut, Holdings, assign, blocks_of

#: how parameters are placed: each with its rows over the ranks, or whole on every rank
SHARDINGS = ("fsdp2", "ddp")


@dataclass(frozen=True)
class Forecast:
    """The work and the memory of each rank; lists are indexed by rank, except `owners`."""

    owners: list[list[int]]  # of the blocks of each parameter, tile by tile
    flops: list[float]  # in a step, refreshes spread evenly
    sent: list[int]  # bytes in a step
    received: list[int]
    factor_bytes: list[int]
    momentum_bytes: list[int]

    @property
    def state_bytes(self) -> list[int]:
        """Bytes of factors and momentum."""
        pairs = zip(self.factor_bytes, self.momentum_bytes, strict=True)
        return [factors + momentum for factors, momentum in pairs]

    @property
    def imbalance(self) -> float:
        """The work of the busiest rank over the mean."""
        return max(self.flops) * len(self.flops) / sum(self.flops)


def forecast(
    shapes: Sequence[tuple[int, ...]], *, world: int, block_size: int | None = 1024,
    structures: Sequence[Any] | None = None, sharding: str = "fsdp2", product_bytes: int = 2,
    parameter_bytes: int = 4, factor_bytes: int = 4, momentum_bytes: int = 4,
) -> Forecast:  # fmt: skip
    """The plan that ranks make for parameters of these shapes, and what it costs.

    Args:
        shapes: of the parameters of a matrix method; those of its companion exchange nothing.
        world: the number of ranks that share the blocks. HSDP with ``Sharded(mesh,
            replicas=k)``: those of one replica.
        block_size: as in ``IFShampoo``.
        structures: of each parameter, as in ``IFShampoo``; None: "auto" for all.
        sharding: "fsdp2", each parameter's rows over all ranks, or "ddp" with ``Sharded()``.
        product_bytes: bytes of an element in the products, in which gradients and directions
            travel: 2 on a GPU, else those of a parameter's.
        parameter_bytes: of a parameter's element, in which updated blocks travel under "ddp".
        factor_bytes: of a factor's element.
        momentum_bytes: of the momentum's; 0: there is none.

    Example:
        >>> from rootfree.placement.forecast import forecast
        >>> found = forecast([(4096, 1024)] * 8, world=4)
        >>> found.imbalance, found.sent == found.received
        (1.0, True)
    """
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ValueError(f"world must be a positive integer, got {world!r}")
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding must be one of {', '.join(SHARDINGS)}, got {sharding!r}")
    if structures is not None and len(structures) != len(shapes):
        raise ValueError(
            f"structures must have an entry for each of the {len(shapes)} shapes, got "
            f"{len(structures)}"
        )
    names = structures if structures is not None else ["auto"] * len(shapes)
    cuts: list[Cut] = [
        structured_tiles(tuple(shape), structure=name, block_size=block_size)
        for shape, name in zip(shapes, names, strict=True)
    ]
    rows_held = sharding == "fsdp2"
    held = {
        i: _rows(shape, cut[0][0].view, world) if rows_held else _copies(cut[0][0].view, world)
        for i, (shape, cut) in enumerate(zip(shapes, cuts, strict=True))
    }
    blocks, holdings = blocks_of(cuts), Holdings(held)
    numbers, load = assign(blocks, holdings, [0.0] * world)
    owners: list[list[int]] = [[] for _ in shapes]
    factors, owned, in_place = ([0] * world for _ in range(3))
    packed = [[sum(math.prod(s.packed_shape) for s in each) for _, each in cut] for cut in cuts]
    for block, owner in zip(blocks, numbers, strict=True):
        owners[block.parameter].append(owner)
        factors[owner] += factor_bytes * packed[block.parameter][block.tile]
        owned[owner] += size_of(block.box)
        in_place[owner] += holdings.shares(block).get(owner, 0)
    if rows_held:
        kept = [0] * world
        for rank, box in (place for places in held.values() for place in places):
            kept[rank] += size_of(box)
        # Gradients go to the owners of blocks, and directions take the same ways back.
        sent = received = [
            product_bytes * (a + b - 2 * both)
            for a, b, both in zip(kept, owned, in_place, strict=True)
        ]
    else:  # updated blocks, from the owner to everybody else
        sent = [parameter_bytes * (world - 1) * n for n in owned]
        received = [parameter_bytes * (sum(owned) - n) for n in owned]
        kept = owned
    return Forecast(owners, load, sent, received, factors, [momentum_bytes * n for n in kept])


def _rows(shape: Sequence[int], view: Sequence[int], world: int) -> list[tuple[int, Box]]:
    """The rows of each rank, as torch cuts them into chunks, as boxes of the view."""
    if not shape:
        return _copies(view, 1)
    rest = whole(shape[1:])
    return in_view([(chunk(shape[0], r, world), *rest) for r in range(world)], shape, view)


def _copies(view: Sequence[int], world: int) -> list[tuple[int, Box]]:
    return [(rank, whole(view)) for rank in range(world)]
