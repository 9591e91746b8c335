"""The home of a parameter: which rank has which part of it, and which owns which block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from rootfree.layout.tiles import Tile
from rootfree.placement.boxes import (
    Box,
    block_boxes,
    box_at,
    in_view,
    shape_of,
    size_of,
    views_of,
    whole,
)
from rootfree.placement.local import is_sharded, offsets_and_shape
from rootfree.placement.owners import Cut, Holdings, assign, blocks_of
from rootfree.placement.ranks import PlacementError, Ranks
from rootfree.placement.sharded import is_replicated


@dataclass(frozen=True, eq=False)
class Home:
    """Of one parameter; the same on every rank, except for `ranks.me`."""

    ranks: Ranks
    shape: tuple[int, ...]
    cut: Cut
    parts: list[Box]  # the part of each rank, in the parameter's own axes
    shards: list[tuple[int, int]]  # (number, count): the shard of saved state on each rank
    at_owner: bool  # whether the owner of a block has its momentum and updates it
    owners: list[list[int]] = field(default_factory=list)  # of the blocks of each tile

    @property
    def view(self) -> tuple[int, ...]:
        """The shape in which blocks are cut."""
        return self.cut[0][0].view

    @cached_property
    def blocks(self) -> list[list[Box]]:
        """The boxes of each tile's blocks, in the view."""
        return [block_boxes(tile) for tile, _ in self.cut]

    @cached_property
    def held(self) -> list[tuple[int, Box]]:
        """(rank, box in the view) of the part of each rank."""
        return in_view(self.parts, self.shape, self.view)

    @cached_property
    def owned(self) -> list[tuple[int, Box]]:
        """(owner, box in the view) of every block."""
        return [
            (owner, box)
            for owners, boxes in zip(self.owners, self.blocks, strict=True)
            for owner, box in zip(owners, boxes, strict=True)
        ]

    def is_whole(self, rank: int) -> bool:
        """Whether a rank has all of the parameter."""
        return self.parts[rank] == whole(self.shape)

    def mine(self, tile: int) -> list[int]:
        """The numbers of the blocks of a tile that this rank owns."""
        return [n for n, owner in enumerate(self.owners[tile]) if owner == self.ranks.me]

    @cached_property
    def my_boxes(self) -> list[Box]:
        """The boxes of all blocks that this rank owns, in the order of their momentum."""
        return [
            self.blocks[tile][number] for tile in range(len(self.cut)) for number in self.mine(tile)
        ]

    @cached_property
    def my_elements(self) -> int:
        """How many elements they have."""
        return sum(map(size_of, self.my_boxes))

    def views(self, here: Tensor) -> dict[Box, Tensor]:
        """Views of the contiguous local part of a tensor like the parameter, by boxes."""
        return views_of(here, self.parts[self.ranks.me], self.shape, self.view)

    def segments(self, momentum: Tensor) -> dict[Box, Tensor]:
        """Views of the one tensor with the momentum of all blocks that this rank owns, by boxes."""
        parts = momentum.split([size_of(box) for box in self.my_boxes])
        return {
            box: each.view(shape_of(box)) for box, each in zip(self.my_boxes, parts, strict=True)
        }

    def check_cut(self, tile: int, found: Tile) -> None:
        """Refuse options that cut the parameter differently since ranks got their blocks."""
        if found != self.cut[tile][0]:
            raise RuntimeError(
                f"`structure` or `block_size` of a parameter of shape {self.shape} was changed "
                "after its blocks were given to ranks; make a new optimizer"
            )

    def local_tile(self, tile: int) -> Tile:
        """A tile with as many blocks as this rank owns."""
        whole_tile = self.cut[tile][0]
        counts = (len(self.mine(tile)), *[1] * (len(whole_tile.sizes) - 1))
        return Tile(whole_tile.view, whole_tile.starts, counts, whole_tile.sizes)

    def single_blocks(self) -> list[Tile]:
        """Each block that this rank owns, as a tile of its own."""
        return [
            tile.single(self.blocks[t][n])
            for t, (tile, _) in enumerate(self.cut)
            for n in self.mine(t)
        ]


def tile_number(key: str) -> int:
    """The number of the tile in a key of the state: block3.factor0 -> 3."""
    return int(key.partition(".")[0].removeprefix("block"))


def description(params: Sequence[Tensor], cuts: Sequence[Cut]) -> dict[str, Any]:
    """Labels and values, describing parameters, that must be the same on all ranks."""
    said: dict[str, Any] = {"the number of parameters": len(params)}
    for i, (p, cut) in enumerate(zip(params, cuts, strict=True)):
        said[f"shape, dtype, device and blocks of parameter {i}"] = (
            *(tuple(p.shape), p.dtype, p.device.type, [tile for tile, _ in cut]),
            "replicated" if is_replicated(p) else "sharded",
        )
    return said


def homes_of(
    params: Sequence[Tensor], cuts: Sequence[Cut], ranks: Ranks, *, at_owners: bool
) -> dict[Tensor, Home]:
    """Homes for the parameters of a group; all ranks must call this with the same ones.

    `at_owners`: whether to divide the momentum of parameters that all ranks have whole.
    """
    everyone = ranks.gathered([(box_at(*offsets_and_shape(p)), _shard(p, ranks)) for p in params])
    homes = []
    for i, (p, cut) in enumerate(zip(params, cuts, strict=True)):
        parts, shards = [each[i][0] for each in everyone], [each[i][1] for each in everyone]
        complete = all(box == whole(p.shape) for box in parts)
        home = Home(ranks, tuple(p.shape), cut, parts, shards, at_owners and complete)
        _check_covered(i, home)
        homes.append(home)
    blocks = blocks_of(cuts)
    holdings = Holdings({i: home.held for i, home in enumerate(homes) if home.cut})
    owners, ranks.load = assign(blocks, holdings, ranks.load)
    for home in homes:
        home.owners.extend([0] * tile.blocks for tile, _ in home.cut)
    for block, owner in zip(blocks, owners, strict=True):
        homes[block.parameter].owners[block.tile][block.number] = owner
    return dict(zip(params, homes, strict=True))


def _shard(p: Any, ranks: Ranks) -> tuple[int, int]:
    """(number, count): this rank's shard of saved state, on the mesh of `p`."""
    if not is_sharded(p):
        return ranks.me, ranks.world
    axis = shard_axis(p)
    if axis is None:
        return 0, 1
    return p.device_mesh.get_coordinate()[axis], p.device_mesh.size(axis)


def shard_axis(p: Any) -> int | None:
    """The longest axis of the mesh over which `p` is sharded."""
    axes = [n for n, each in enumerate(p.placements) if not each.is_replicate()]
    return max(axes, key=lambda n: p.device_mesh.size(n), default=None)


def _check_covered(i: int, home: Home) -> None:
    found = sum(size_of(box) for box in {*home.parts})
    if found != math.prod(home.shape):
        raise PlacementError(
            f"the mesh must cover the parameters: the ranks {home.ranks.ranks} have {found} of the "
            f"{math.prod(home.shape)} elements of parameter {i} of shape {home.shape}"
        )
