"""Which blocks travel together: rounds of a bounded number of bytes.

While a round is computed, the gradients of the next one and the directions of the previous one are
on their way. The blocks of every owner, in the order of its slabs, are split by bytes. All ranks
know all owners, so they compute the same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rootfree.kernels.stack import Share
from rootfree.layout.buckets import Bucket, Slot
from rootfree.placement.boxes import Box
from rootfree.placement.exchange import Piece, piece_of, stand_in
from rootfree.placement.homes import Home, tile_number

# About how many bytes of blocks an owner works on in a round.
ROUND_BYTES = 64 * 2**20

#: of each parameter: (owner, box) of blocks
Owned = dict[int, list[tuple[int, Box]]]


@dataclass(frozen=True, eq=False)
class Round:
    """Blocks that travel together, and this rank's share of them."""

    dtype: torch.dtype  # in which gradients and directions travel
    owned: Owned
    shares: list[Share]  # what this rank works on
    rows: dict[tuple[int, Box], Piece]  # by parameter and box: the place in the shares' stacks


class _Place(NamedTuple):
    """Where a block is in the slabs of this rank."""

    bucket: int
    row: int
    slot: Slot


def divided(
    homes: Sequence[Home], dtypes: Sequence[torch.dtype], limit: int
) -> list[tuple[torch.dtype, Owned]]:
    """The blocks of parameters by rounds; `dtypes`: in which each parameter's blocks travel."""
    alike: dict[Any, list[tuple[int, int]]] = {}  # tiles whose blocks share a slab
    for i, home in enumerate(homes):
        for t, (tile, structures) in enumerate(home.cut):
            alike.setdefault((str(dtypes[i]), tile.sizes, structures), []).append((i, t))
    rounds: dict[tuple[str, int], tuple[torch.dtype, Owned]] = {}
    filled: dict[tuple[str, int], int] = {}  # bytes of an owner, by dtype
    for (name, sizes, _), tiles in alike.items():
        for i, t in tiles:
            size = math.prod(sizes) * dtypes[i].itemsize
            for owner, box in zip(homes[i].owners[t], homes[i].blocks[t], strict=True):
                before = filled.get((name, owner), 0)
                filled[name, owner] = before + size
                _, owned = rounds.setdefault((name, before // limit), (dtypes[i], {}))
                owned.setdefault(i, []).append((owner, box))
    return [rounds[key] for key in sorted(rounds)]


def make_rounds(
    params: Sequence[Tensor], homes: Sequence[Home], buckets: Sequence[Bucket[Any]],
    dtypes: Sequence[torch.dtype],
) -> list[Round]:  # fmt: skip
    """The rounds of a step on these parameters; the buckets hold the blocks of this rank."""
    members = {p: i for i, p in enumerate(params)}
    places: dict[tuple[int, Box], _Place] = {}
    for number, bucket in enumerate(buckets):
        start = 0
        for slot in bucket.slots:
            if slot.p in members:
                i, tile = members[slot.p], tile_number(slot.prefix)
                boxes = [homes[i].blocks[tile][n] for n in homes[i].mine(tile)]
                for row, box in enumerate(boxes, start):
                    places[i, box] = _Place(number, row, slot)
            start += slot.tile.blocks
    found = []
    for dtype, owned in divided(homes, dtypes, ROUND_BYTES):
        mine = [(i, box) for i, blocks in owned.items() for _, box in blocks if (i, box) in places]
        shares, rows = _shares(mine, places, buckets)
        found.append(Round(dtype, owned, shares, rows))
    return found


def _shares(
    mine: Sequence[tuple[int, Box]], places: Mapping[tuple[int, Box], _Place],
    buckets: Sequence[Bucket[Any]],
) -> tuple[list[Share], dict[tuple[int, Box], Piece]]:  # fmt: skip
    """The share of each bucket in a round, with every block as a slot of its own."""
    shares: list[Share] = []
    rows: dict[tuple[int, Box], Piece] = {}
    for number, bucket in enumerate(buckets):
        blocks = [at for at in mine if places[at].bucket == number]
        if not blocks:
            continue
        blocks.sort(key=lambda at: places[at].row)
        stack = stand_in((len(blocks), *bucket.slots[0].tile.sizes))
        rows.update({at: piece_of(len(shares), stack[n]) for n, at in enumerate(blocks)})
        whole = len(blocks) == sum(slot.tile.blocks for slot in bucket.slots)
        taken = None if whole else _runs([places[at].row for at in blocks])
        slots = [
            replace(places[i, box].slot, tile=places[i, box].slot.tile.single(box), pieces=[])
            for i, box in blocks
        ]
        shares.append(Share(bucket, slots, taken, len(blocks)))
    return shares, rows


def _runs(rows: Sequence[int]) -> list[slice]:
    """Ascending numbers as slices.

    >>> _runs([0, 1, 2, 5, 6])
    [slice(0, 3, None), slice(5, 7, None)]
    """
    found: list[slice] = []
    for row in rows:
        if found and found[-1].stop == row:
            found[-1] = slice(found[-1].start, row + 1)
        else:
            found.append(slice(row, row + 1))
    return found
