"""What the matrix methods share: parameters cut into blocks, blocks stacked into buckets.

A method says which axes get which structure, what state a stack of blocks needs, and how to turn
gradients of the stack into a direction; momentum, decay and the step are the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rootfree.blocks import Tile
from rootfree.buckets import Bucket, Slot
from rootfree.curvature import BlockCurvature, Curvature
from rootfree.optimizer import Group, RootFreeOptimizer
from rootfree.precision import add_momentum, parameter_state, working_dtype
from rootfree.rounding import widened
from rootfree.rules.momentum import cap_rms_, heavy_ball_, rms_matched_heavy_ball_
from rootfree.schedules import schedule
from rootfree.structures import Structure


class BlockOptimizer(RootFreeOptimizer):
    """Base of the matrix methods; subclasses define `_tiles`, `_block_state` and `_direction`."""

    _elements_at_once = None  # buckets have all their members at once

    #: buckets by group; made when first needed, so that copies and unpickled optimizers have none
    _layouts: Mapping[int, list[Bucket]] = {}

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, curvature: Curvature | None = None
    ) -> None:
        super().__init__(params, {**defaults, "step": 0}, curvature=curvature)

    # -- what a method defines ---------------------------------------------------------------

    def _tiles(self, p: Tensor, group: Group) -> list[tuple[Tile, tuple[Structure, ...]]]:
        """How `p` is cut, and the structure of the factor of each axis."""
        raise NotImplementedError

    def _block_state(
        self, p: Tensor, tile: Tile, structures: tuple[Structure, ...], group: Group
    ) -> dict[str, Tensor]:
        """State of the tile's blocks; every tensor has the blocks as its first axis."""
        raise NotImplementedError

    def _direction(
        self,
        group: Group,
        structures: tuple[Structure, ...],
        state: dict[str, Tensor],
        G: Tensor,
        refresh: bool,
        H: BlockCurvature | None,
    ) -> Tensor:
        """Direction U of a stack of gradients; on refresh the state is updated first, in place.

        H None: the curvature is B·ggᵀ.
        """
        raise NotImplementedError

    def _gradient_dtype(self, p: Tensor, group: Group) -> torch.dtype:
        """The dtype in which gradients are handed to `_direction`."""
        return working_dtype(p)

    # -- state -------------------------------------------------------------------------------

    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for prefix, tile, structures in self._slots_of(p, group):
            for name, tensor in self._block_state(p, tile, structures, group).items():
                state[prefix + name] = tensor
        fill = {"momentum": 0.0} if group["momentum"] > 0 else {}
        return {**state, **parameter_state(p, group, fill, salt=len(self.state))}

    def _shape_of(self, p: Tensor) -> tuple[int, ...]:
        """The shape of what is preconditioned with `p`: its own, or [W b] of a joint pair."""
        return tuple(p.shape) if self._curvature is None else self._curvature.shape_of(p)

    def _slots_of(self, p: Tensor, group: Group) -> list[tuple[str, Tile, tuple[Structure, ...]]]:
        if p.numel() == 0 or (self._curvature is not None and self._curvature.is_joint_bias(p)):
            return []
        return [
            (f"block{i}.", tile, structures)
            for i, (tile, structures) in enumerate(self._tiles(p, group))
        ]

    def _describe(self, p: Tensor, group: Group) -> str:
        parts = []
        for _, tile, structures in self._slots_of(p, group):
            factors = " x ".join(f"{s.name} {s.d}" for s in structures)
            parts.append(f"{tile.blocks} of {factors}" if tile.blocks > 1 else factors)
        if self._curvature is not None and self._curvature.is_joint_bias(p):
            return "with its weight"
        joint = self._curvature is not None and self._curvature.is_joint_weight(p)
        return "; ".join(parts) + (" (with its bias)" if joint else "") or "none"

    def _checked_group(self, param_group: dict[str, Any]) -> Group:
        group = super()._checked_group(param_group)
        for i, entry in enumerate(group["params"]):
            name, p = entry if isinstance(entry, tuple) else (i, entry)
            what = f"parameter {name} of shape {tuple(p.shape)}"
            if hasattr(p, "full_tensor"):
                raise TypeError(
                    f"{what} is sharded (a DTensor); {type(self).__name__} takes whole parameters "
                    "only, as under DDP. The diagonal methods take sharded ones"
                )
            try:  # an impossible structure or block size is found before anything is changed
                self._slots_of(p, group)
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from error
        return group

    def _buckets(self, group: Group) -> list[Bucket]:
        """The group's buckets, with slabs that hold the parameters' state."""
        if id(group) not in self._layouts:
            buckets: dict[Any, Bucket] = {}
            for p in group["params"]:
                for prefix, tile, structures in self._slots_of(p, group):
                    key = (p.device, p.dtype, tile.sizes, structures)
                    slots = buckets.setdefault(key, Bucket(structures)).slots
                    slots.append(Slot(p, tile, prefix))
            # A new dict, not an entry: the class attribute is the empty start of all optimizers.
            self._layouts = {**self._layouts, id(group): list(buckets.values())}
        for bucket in self._layouts[id(group)]:
            bucket.adopt(self.state)
        return self._layouts[id(group)]

    def _refreshes(self, group: Group) -> bool:
        return schedule(group["update_every"])(group["step"])

    def _follow_device(self, ps: list[Tensor]) -> None:
        super()._follow_device(ps)
        self._layouts = {}  # a bucket is on one device

    # -- the step ----------------------------------------------------------------------------

    @_disable_dynamo
    def _update(self, group: Group, ps: list[Tensor], gs: list[Tensor]) -> None:
        gradients = dict(zip(ps, gs, strict=True))
        source = self._curvature
        if source is not None:
            gradients = source.joined(gradients)
        # Directions are parameter-shaped and contiguous, whatever the parameter's own layout.
        dtype = working_dtype(ps[0])
        directions = {
            p: torch.empty(self._shape_of(p), dtype=dtype, device=p.device) for p in gradients
        }
        refresh = self._refreshes(group)
        for bucket in self._buckets(group):
            if not any(slot.p in gradients for slot in bucket.slots):
                continue
            G = bucket.gather(gradients, dtype=self._gradient_dtype(ps[0], group))
            # Members without a gradient are left out, their state untouched.
            state = bucket.state_of(gradients)
            H = None
            if source is not None and refresh:
                tiles = [(slot.p, slot.tile) for slot in bucket.slots if slot.p in gradients]
                H = source.blocks(tiles, G, B=group["batch_size"])
            U = self._direction(group, bucket.structures, state, G, refresh, H)
            bucket.scatter_(directions, U)
            if refresh:
                bucket.write_back_(gradients, state)
        us = [directions[p] for p in ps] if source is None else source.parted(directions, ps)
        self._descend(group, ps, us)

    def _descend(self, group: Group, ps: list[Tensor], us: list[Tensor]) -> None:
        if group["momentum"] > 0 and not self._states(ps, "momentum"):
            add_momentum(group, self.state)
        if group["max_update_rms"] is not None:
            cap_rms_(us, cap=group["max_update_rms"])
        step: dict[str, Any] = {
            "lr": group["lr"],
            "alpha1": group["momentum"],
            "kappa": group["weight_decay"],
        }
        counters = self._states(ps, "rounding")
        with widened(self._states(ps, "momentum"), working_dtype(ps[0]), counters) as ms:
            if group["update_rms"] is None:
                heavy_ball_(ps, ms, us, **step)
            else:
                rms_matched_heavy_ball_(ps, ms, us, r=group["update_rms"], **step)

    @_disable_dynamo
    def _end_step(self) -> None:
        for group in self.param_groups:
            group["step"] += 1

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._layouts = {}  # the checkpoint's structures and block sizes may differ
