"""State as checkpoints have it: DTensors with the shapes of one process.

Owners keep the factors and the momentum of their blocks. In a checkpoint these are DTensors of the
shapes that the state has in one process. Factors are sharded along their rows (a parameter has few
blocks and many rows), momentum along its first axis, over the mesh of the parameter or over all
ranks that share its blocks. Such a checkpoint fits any number of ranks and any parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rootfree.placement.boxes import Box, chunk, in_view, part, shape_of, size_of, views_of, whole
from rootfree.placement.exchange import move
from rootfree.placement.gathering import gathers, whole_tensor
from rootfree.placement.homes import Home, shard_axis, tile_number
from rootfree.placement.local import is_sharded, local, offsets_and_shape
from rootfree.placement.routes import Places, make_route

State = Mapping[str, Tensor]
Boxes = dict[Box, Tensor]


class Entry(NamedTuple):
    """A tensor of the state that is divided among the owners of blocks."""

    p: Tensor
    home: Home
    key: str
    shape: tuple[int, ...]  # of the whole
    view: tuple[int, ...]  # the shape whose axes boxes refer to
    owned: Places
    cut: int | None  # the axis that is sharded over the mesh
    owners_part: Tensor  # what this rank owns
    mine: Boxes  # the same by boxes

    @property
    def shards(self) -> list[Box]:
        """The shard of the saved tensor on each rank, as torch cuts it into chunks."""
        return [
            tuple(
                chunk(d, number, count) if axis == self.cut else (0, d)
                for axis, d in enumerate(self.shape)
            )
            for number, count in self.home.shards
        ]

    @property
    def my_shard(self) -> Box:
        """The shard of this rank."""
        return self.shards[self.home.ranks.me]

    @property
    def saved(self) -> Places:
        """(rank, box in the view) of all shards."""
        return in_view(self.shards, self.shape, self.view)

    def views(self, shard: Tensor) -> Boxes:
        """This rank's shard of the saved tensor by boxes of the view."""
        return views_of(shard, self.my_shard, self.shape, self.view)

    def placements(self) -> tuple[Any, list[Any]]:
        """The mesh of the saved tensor, and its placements there."""
        from torch.distributed.tensor import Replicate, Shard

        p, ranks = self.p, self.home.ranks
        mesh: Any = p.device_mesh if is_sharded(p) else ranks.mesh(p.device.type)  # type: ignore[attr-defined]
        axis = shard_axis(p) if is_sharded(p) else 0
        shard = Replicate() if self.cut is None else Shard(self.cut)
        return mesh, [shard if n == axis else Replicate() for n in range(mesh.ndim)]


def entries_of(p: Tensor, home: Home, row: State) -> list[Entry]:
    """The part of a parameter's state that is divided among the owners of its blocks."""
    found = []
    for key, tensor in ordered(row).items() if home.cut else ():
        if key.startswith("block"):
            tile = tile_number(key)
            owners, rest = home.owners[tile], tuple(tensor.shape[1:])
            boxes: list[Box] = [((n, n + 1), *whole(rest)) for n in range(len(owners))]
            mine = {boxes[n]: tensor[k : k + 1] for k, n in enumerate(home.mine(tile))}
            shape, owned = (len(owners), *rest), [*zip(owners, boxes, strict=True)]
            cut = 1 if rest else None
            found.append(Entry(p, home, key, shape, shape, owned, cut, tensor, mine))
        elif key == "momentum" and home.at_owner:
            mine, cut = home.segments(tensor), 0 if home.shape else None
            found.append(Entry(p, home, key, home.shape, home.view, home.owned, cut, tensor, mine))
    return found


def ordered(row: Mapping[str, Any]) -> dict[str, Any]:
    """State in an order that is the same on all ranks."""
    return {key: row[key] for key in sorted(row)}


def saved_rows(
    rows: Mapping[Tensor, State], homes: Mapping[Tensor, Home]
) -> dict[Tensor, dict[str, Any]]:
    """The state of parameters with homes in the form of checkpoints. All ranks must ask."""
    entries = [e for p, row in rows.items() if p in homes for e in entries_of(p, homes[p], row)]
    shards = [e.owners_part.new_empty(shape_of(e.my_shard)) for e in entries]
    _exchange(
        [(e, e.owned, e.saved, e.mine, e.views(s)) for e, s in zip(entries, shards, strict=True)]
    )
    found = {p: ordered(row) for p, row in rows.items() if p in homes}
    for entry, shard in zip(entries, shards, strict=True):
        found[entry.p][entry.key] = _assembled(entry, shard)
    return found


def owned_rows(
    like: Mapping[Tensor, State], homes: Mapping[Tensor, Home], given: Mapping[Tensor, State]
) -> dict[Tensor, dict[str, Tensor]]:
    """The inverse: this rank's part of a checkpoint, written into the tensors of `like`.

    Tensors of the checkpoint may be DTensors, or whole on every rank.
    """
    entries = _given_entries(like, homes, given)
    found: dict[Tensor, dict[str, Any]] = {p: dict(row) for p, row in given.items()}
    for entry in entries:  # replace what is whole by what this rank owns
        found[entry.p][entry.key] = entry.owners_part
    for p, row in found.items():
        for key in [key for key in row if key in like.get(p, {})]:
            row[key] = placed_like(like[p][key], row[key])
    _exchange(
        [(e, e.saved, e.owned, e.views(_shard(e, given[e.p][e.key])), e.mine) for e in entries]
    )
    return found


def mismatches(
    like: Mapping[Tensor, State], homes: Mapping[Tensor, Home], given: Mapping[Tensor, State]
) -> Iterable[str]:
    """Messages about tensors of a checkpoint that do not fit."""
    for entry in _given_entries(like, homes, given):
        tensor: Any = given[entry.p][entry.key]
        what = f"the checkpoint's {entry.key!r} of a parameter of shape {entry.home.shape}"
        if not isinstance(tensor, Tensor):
            yield f"{what} must be a Tensor, got {type(tensor).__name__}"
        elif tuple(tensor.shape) != entry.shape:
            yield f"{what} has shape {tuple(tensor.shape)}, but must have {entry.shape}"


def _given_entries(
    like: Mapping[Tensor, State], homes: Mapping[Tensor, Home], given: Mapping[Tensor, State]
) -> list[Entry]:
    """The entries that a checkpoint has; what it lacks is refused elsewhere."""
    return [
        entry
        for p, row in like.items()
        if p in homes
        for entry in entries_of(p, homes[p], row)
        if entry.key in given[p]
    ]


def _exchange(moves: Sequence[tuple[Entry, Places, Places, Boxes, Boxes]]) -> None:
    """Move entries between ranks, by one exchange for each group of ranks, dtype and device.

    A move is an entry, its places before and after, and this rank's tensors before and after.
    """
    kinds: dict[Any, list[Any]] = {}
    for entry, *ways in moves:
        kind = (entry.home.ranks, entry.owners_part.dtype, entry.owners_part.device)
        kinds.setdefault(kind, []).append(ways)
    for (ranks, dtype, device), alike in kinds.items():
        before, after, mine_before, mine_after = zip(*alike, strict=True)
        sources, targets = dict(enumerate(before)), dict(enumerate(after))
        route = make_route(sources, targets, me=ranks.me, world=ranks.world)
        have, want = (
            {(n, box): t for n, boxes in enumerate(mine) for box, t in boxes.items()}
            for mine in (mine_before, mine_after)
        )
        move(route, have, want, dtype=dtype, device=device, group=ranks.group)


def _assembled(entry: Entry, shard: Tensor) -> Any:
    from torch.distributed.tensor import DTensor

    mesh, placements = entry.placements()
    shape = torch.Size(entry.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def _shard(entry: Entry, given: Any) -> Tensor:
    """This rank's shard of a checkpoint's tensor."""
    if is_sharded(given):
        mesh, placements = entry.placements()
        same = list(given.placements) == placements
        if given.device_mesh == mesh and (same or gathers(given)):
            given = given if same else given.redistribute(mesh, placements)
            return local(given).to(entry.owners_part.dtype).contiguous()
        given = whole_tensor(given)
    mine = part(given, whole(entry.shape), entry.my_shard)
    return mine.to(entry.owners_part.dtype).contiguous()


def placed_like(mine: Any, given: Any) -> Any:
    """A tensor of a checkpoint, placed like the one that it is copied into."""
    if mine.shape != getattr(given, "shape", None):
        return given
    if is_sharded(given):
        if is_sharded(mine) and mine.device_mesh == given.device_mesh:
            return given
        given = whole_tensor(given)
    if not is_sharded(mine):
        return given
    from torch.distributed.tensor import DTensor

    offsets, shape = offsets_and_shape(mine)
    for axis, (start, d) in enumerate(zip(offsets, shape, strict=True)):
        given = given.narrow(axis, start if d else 0, d)
    return DTensor.from_local(
        given.to(local(mine).device).contiguous(), mine.device_mesh, mine.placements,
        run_check=False, shape=mine.shape, stride=mine.stride(),
    )  # fmt: skip


def whole_bytes(p: Tensor, home: Home, row: State) -> int:
    """Bytes of a parameter's state on all ranks together, copies counted once."""
    shared = {e.key: size_of(whole(e.shape)) for e in entries_of(p, home, row)}
    return sum(shared.get(key, t.numel()) * t.element_size() for key, t in row.items())
