"""Blocks of one shape from all parameters of a group, stacked in one slab.

State belongs to parameters (`state[p]`, so that checkpoints know nothing of stacking), but is
worked on by the bucket: the tensors in `state[p]` are views of the bucket's slabs, and one batched
call serves every block of the model that has the same shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rootfree.layout.tiles import Piece, Tile
from rootfree.structures import Structure

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Slot:
    """The blocks of one tile of one parameter, and the prefix of their keys in its state."""

    p: Tensor
    tile: Tile
    prefix: str
    pieces: list[Piece]


@dataclass
class Bucket(Generic[Plan]):
    """Slots of equal blocks; `slabs` maps a state name to (b, ...), b blocks of all slots."""

    structures: tuple[Structure, ...]
    plan: Plan
    slots: list[Slot] = field(default_factory=list)
    slabs: dict[str, Tensor] = field(default_factory=dict)

    def adopt(self, rows: Iterable[Mapping[str, Tensor]]) -> None:
        """Stack the state of the slots, one mapping (name -> tensor) each."""
        first, *others = rows
        self.slabs = {
            name: torch.cat([tensor, *(row[name] for row in others)])
            for name, tensor in first.items()
        }

    def views(self) -> list[dict[str, Tensor]]:
        """What each slot has of the slabs."""
        counts = [slot.tile.blocks for slot in self.slots]
        views: list[dict[str, Tensor]] = [{} for _ in counts]
        for name, slab in self.slabs.items():
            for row, view in zip(views, slab.split(counts), strict=True):
                row[name] = view
        return views

    def rows_of(self, slots: Iterable[int]) -> list[slice]:
        """The blocks of some slots."""
        wanted, rows, done = set(slots), [], 0
        for i, slot in enumerate(self.slots):
            if i in wanted:
                rows.append(slice(done, done + slot.tile.blocks))
            done += slot.tile.blocks
        return rows


def rows_in(stack: Tensor, rows: Sequence[slice]) -> Tensor:
    """Some rows of a stack: a view of one run, a copy of several."""
    return stack[rows[0]] if len(rows) == 1 else torch.cat([stack[each] for each in rows])


def select(slabs: Mapping[str, Tensor], rows: Sequence[slice]) -> dict[str, Tensor]:
    """Some rows of every slab."""
    return {name: rows_in(slab, rows) for name, slab in slabs.items()}


def put_back_(slabs: Mapping[str, Tensor], rows: list[slice], state: Mapping[str, Tensor]) -> None:
    """Bring what `select` gave back into the slabs."""
    if len(rows) == 1:
        return  # it is there
    counts = [each.stop - each.start for each in rows]
    for name, stack in state.items():
        for each, part in zip(rows, stack.split(counts), strict=True):
            slabs[name][each].copy_(part)
