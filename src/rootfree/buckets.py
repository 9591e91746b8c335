"""Blocks of one shape from all parameters of a group, stacked in one slab.

State belongs to parameters (`state[p]`, so that checkpoints know nothing of stacking), but is
worked on by the bucket: the tensors in `state[p]` are views of the bucket's slabs, and one batched
call serves every block of the model that has the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rootfree.blocks import Tile
from rootfree.structures import Structure

State = Mapping[Tensor, dict[str, Tensor]]

# On a CPU a stack is worked on in portions of about this many elements for each thread: temporaries
# stay in the cache, and the allocator uses their memory again instead of asking for new pages.
PORTION = 3 * 2**19


@dataclass(frozen=True)
class Slot:
    """The blocks of one tile of one parameter, and the prefix of their keys in its state."""

    p: Tensor
    tile: Tile
    prefix: str


@dataclass
class Bucket:
    """Slots of equal blocks; `slabs` maps a state name to (b, ...), b blocks of all slots."""

    structures: tuple[Structure, ...]
    slots: list[Slot] = field(default_factory=list)
    slabs: dict[str, Tensor] = field(default_factory=dict)
    _views: list[dict[str, Tensor]] = field(default_factory=list)
    #: (state[p], key, view) of everything adopted
    _held: list[tuple[dict[str, Tensor], str, Tensor]] = field(default_factory=list)

    def adopt(self, state: State) -> None:
        """Stack what the parameters hold, and give them views of the stack, unless they have them.

        A state tensor that somebody replaced (a copy, a move, a checkpoint) is taken up here.
        """
        if self._held and all(row.get(key) is view for row, key, view in self._held):
            return
        first = self.slots[0]
        names = [key[len(first.prefix) :] for key in state[first.p] if key.startswith(first.prefix)]
        self._views = [{} for _ in self.slots]
        for name in names:
            held = [state[slot.p][slot.prefix + name] for slot in self.slots]
            slab = self.slabs[name] = torch.cat(held)
            for slot, views, view in zip(
                self.slots, self._views, slab.split([len(t) for t in held]), strict=True
            ):
                views[name] = state[slot.p][slot.prefix + name] = view
        self._held = [
            (state[slot.p], slot.prefix + name, view)
            for slot, views in zip(self.slots, self._views, strict=True)
            for name, view in views.items()
        ]

    def gather(self, tensors: Mapping[Tensor, Tensor], *, dtype: torch.dtype) -> Tensor:
        """Blocks of the parameter-shaped tensors that are there: (b, d_1..d_N) in slot order."""
        present = [slot for slot in self.slots if slot.p in tensors]
        total = sum(slot.tile.blocks for slot in present)
        device, sizes = present[0].p.device, present[0].tile.sizes
        stack = torch.empty(total, *sizes, dtype=dtype, device=device)
        for slot, part in zip(present, _split(stack, present), strict=True):
            slot.tile.stacked_grid(part).copy_(slot.tile.grid(tensors[slot.p]))
        return stack

    def scatter_(self, tensors: Mapping[Tensor, Tensor], stack: Tensor) -> None:
        """Write a stack in slot order back into parameter-shaped contiguous tensors."""
        present = [slot for slot in self.slots if slot.p in tensors]
        for slot, part in zip(present, _split(stack, present), strict=True):
            slot.tile.grid(tensors[slot.p]).copy_(slot.tile.stacked_grid(part))

    def state_of(self, tensors: Mapping[Tensor, Any]) -> dict[str, Tensor]:
        """The slabs; where some parameters are not in `tensors`, copies of the others' rows."""
        if all(slot.p in tensors for slot in self.slots):
            return self.slabs
        present = [
            views for slot, views in zip(self.slots, self._views, strict=True) if slot.p in tensors
        ]
        return {name: torch.cat([views[name] for views in present]) for name in self.slabs}

    def write_back_(self, tensors: Mapping[Tensor, Any], state: Mapping[str, Tensor]) -> None:
        """Put what `state_of` gave back into the slabs, if it was a copy."""
        if state is self.slabs:
            return
        present = [i for i, slot in enumerate(self.slots) if slot.p in tensors]
        for name, stack in state.items():
            parts = _split(stack, [self.slots[i] for i in present])
            for i, part in zip(present, parts, strict=True):
                self._views[i][name].copy_(part)


def portions(stack: Tensor, state: Mapping[str, Tensor]) -> list[slice]:
    """Rows of a stack and its state that are worked on together: on a GPU all of them."""
    if stack.device.type != "cpu":
        return [slice(None)]
    largest = max(tensor[0].numel() for tensor in (stack, *state.values()))
    # Batched products give whole blocks to the threads: as many to each.
    count = torch.get_num_threads() * max(1, PORTION // largest)
    return [slice(i, i + count) for i in range(0, len(stack), count)]


def _split(stack: Tensor, slots: Sequence[Slot]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = stack.split([slot.tile.blocks for slot in slots])
    return parts
