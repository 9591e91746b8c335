"""What the matrix methods share: parameters cut into blocks, blocks stacked into buckets.

A method says which axes get which structure, what state a stack of blocks needs, and how to turn
gradients of the stack into a direction; momentum, decay and the step are the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rootfree.blocks import Tile
from rootfree.buckets import Bucket, Slot, portions
from rootfree.curvature import BlockCurvature, Curvature
from rootfree.gradients import KnownList
from rootfree.groups import named
from rootfree.kernels.blocks import FusedBlocks, Stack
from rootfree.optimizer import Group, RootFreeOptimizer
from rootfree.precision import add_momentum, parameter_state, working_dtype
from rootfree.rounding import widened
from rootfree.rules.momentum import cap_rms_, heavy_ball_, rms_matched_heavy_ball_
from rootfree.schedules import schedule
from rootfree.structures import Structure

# Options that the directions of a step do not depend on, given which blocks there are.
_NOT_IN_DIRECTIONS = {
    "lr", "momentum", "weight_decay", "update_rms", "max_update_rms", "state_dtype",
    "update_every", "structure", "block_size",
}  # fmt: skip

# Options that may be changed between steps and that the form of the state depends on.
_FORM_OPTIONS = ("matmul_dtype", "factor_dtype", "update_rms")


class BlockOptimizer(RootFreeOptimizer):
    """Base of the matrix methods; subclasses define `_tiles`, `_block_state` and `_direction`."""

    _elements_at_once = None  # buckets have all their members at once

    #: buckets by group, with the options that they are for; made when first needed, so that copies
    #: and unpickled optimizers have none
    _layouts: Mapping[int, tuple[tuple[Any, ...], list[Bucket]]] = {}

    _kernel_name = "blocks"

    #: whether `_direction` is nothing but launches, and so can be replayed from a CUDA graph
    _replayable: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        curvature: Curvature | None = None,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {**defaults, "step": 0},
            curvature=curvature,
            fused=fused,
            capturable=capturable,
        )

    # -- what a method defines ---------------------------------------------------------------

    @abstractmethod
    def _tiles(self, p: Tensor, group: Group) -> list[tuple[Tile, tuple[Structure, ...]]]:
        """How `p` is cut, and the structure of the factor of each axis."""

    @abstractmethod
    def _block_state(
        self, p: Tensor, tile: Tile, structures: tuple[Structure, ...], group: Group
    ) -> dict[str, Tensor]:
        """State of the tile's blocks; every tensor has the blocks as its first axis."""

    @abstractmethod
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

    def _direction_(
        self,
        group: Group,
        structures: tuple[Structure, ...],
        state: dict[str, Tensor],
        G: Tensor,
        squares: Tensor,
        refresh: bool,
    ) -> None:
        """G <- its direction; `squares` (b, n) are partial sums of G², made on refresh."""
        G.copy_(self._direction(group, structures, state, G, refresh, None))

    def _gradient_dtype(
        self, p: Tensor, structures: tuple[Structure, ...], group: Group
    ) -> torch.dtype:
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
        for what, p in named(group["params"]):
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
        options = tuple(group.get(name) for name in _FORM_OPTIONS)
        known, buckets = self._layouts.get(id(group), (None, []))
        if known != options:
            buckets = self._new_buckets(group)
            # A new dict, not an entry: the class attribute is the empty start of all optimizers.
            self._layouts = {**self._layouts, id(group): (options, buckets)}
        for bucket in buckets:
            bucket.adopt(self.state)
        return buckets

    def _new_buckets(self, group: Group) -> list[Bucket]:
        found: dict[Any, Bucket] = {}
        for p in group["params"]:
            for prefix, tile, structures in self._slots_of(p, group):
                key = (p.device, p.dtype, tile.sizes, structures)
                found.setdefault(key, Bucket(structures)).slots.append(Slot(p, tile, prefix))
        buckets = list(found.values())
        # State made with other options, or on a machine with other kernels, may have another form.
        if not all(self._has_its_form(bucket, group) for bucket in buckets):
            self._settle(group)
        return buckets

    def _has_its_form(self, bucket: Bucket, group: Group) -> bool:
        p, tile, prefix = (slot := bucket.slots[0]).p, slot.tile, slot.prefix
        wanted = {prefix + name for name in self._block_state(p, tile, bucket.structures, group)}
        return wanted == {key for key in self.state[p] if key.startswith(prefix)}

    def _refreshes(self, group: Group) -> bool:
        return schedule(group["update_every"])(group["step"])

    @property
    def refreshes_next(self) -> bool:
        """Whether the next step refreshes a preconditioner: the one whose curvature is used."""
        return any(self._refreshes(group) for group in self.param_groups)

    def _settle(self, group: Group) -> None:
        super()._settle(group)
        self._layouts = {}  # a bucket is on one device

    # -- the step ----------------------------------------------------------------------------

    @_disable_dynamo
    def _update(self, group: Group, ps: list[Tensor], gs: list[Tensor]) -> None:
        kernel = self._kernel_for(ps[0])
        if kernel and group["update_rms"] is None and ps[0].dtype != torch.float64:
            if not isinstance(ps, KnownList):  # a compiled step remembers no lists, this part does
                assert self._work_lists is not None
                lists = self._work_lists.of(group)
                ps, gs = next((known, found) for known, found in lists if known[0] is ps[0])
            with torch.cuda.device_of(ps[0]):
                self._update_fused(kernel, group, ps, gs)
            return
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
            dtype = self._gradient_dtype(ps[0], bucket.structures, group)
            G = bucket.gather(gradients, dtype=dtype)
            # Members without a gradient are left out, their state untouched.
            state = bucket.state_of(gradients)
            H = None
            if source is not None and refresh:
                tiles = [(slot.p, slot.tile) for slot in bucket.slots if slot.p in gradients]
                H = source.blocks(tiles, G, B=group["batch_size"])
            for rows in [slice(None)] if H is not None else portions(G, state):
                part = {name: slab[rows] for name, slab in state.items()}
                G[rows] = self._direction(group, bucket.structures, part, G[rows], refresh, H)
            bucket.scatter_(directions, G)
            if refresh:
                bucket.write_back_(gradients, state)
        us = [directions[p] for p in ps] if source is None else source.parted(directions, ps)
        self._descend(group, ps, us)

    def _update_fused(
        self, kernel: FusedBlocks, group: Group, ps: list[Tensor], gs: list[Tensor]
    ) -> None:
        """The same with kernels: directions are written over the gathered gradients."""
        if group["momentum"] > 0 and not self._states(ps, "momentum"):
            add_momentum(group, self.state)
        refresh = self._refreshes(group)
        buckets = self._buckets(group)
        for dtype, stack, where in self._stacks(kernel, group, ps, buckets):
            mine = stack.ps
            kernel.gather_(stack, [gs[i] for i in where], dtype=dtype, squares=refresh)
            numbers = [group[name] for name in self.options if name not in _NOT_IN_DIRECTIONS]
            stack.replay((refresh, *numbers), partial(self._directions_, group, stack, refresh))
            kernel.descend_(
                stack,
                mine,
                self._states(mine, "momentum"),
                self._states(mine, "rounding"),
                lr=group["lr"],
                alpha1=group["momentum"],
                kappa=group["weight_decay"],
                cap=group["max_update_rms"],
            )

    def _directions_(self, group: Group, stack: Stack, refresh: bool) -> None:
        """Gradients in the stack <- their directions."""
        for bucket, G, squares in stack.parts():
            state = bucket.state_of(stack.members)
            self._direction_(group, bucket.structures, state, G, squares, refresh)
            if refresh:
                bucket.write_back_(stack.members, state)

    def _stacks(
        self, kernel: FusedBlocks, group: Group, ps: list[Tensor], buckets: list[Bucket]
    ) -> list[tuple[torch.dtype, Stack, list[int]]]:
        """Stacks of one dtype each, with the positions of their parameters in ps."""
        assert isinstance(ps, KnownList)
        known = ps.known.get("stacks")
        if known is not None and known[0] is buckets:
            return cast("list[tuple[torch.dtype, Stack, list[int]]]", known[1])
        everything = [p for each in self.param_groups for p in each["params"]]
        model = sum(p.numel() for p in everything) if self._replayable else None
        present = set(ps)
        by_dtype: dict[torch.dtype, list[Bucket]] = {}
        for bucket in buckets:
            if any(slot.p in present for slot in bucket.slots):
                dtype = self._gradient_dtype(ps[0], bucket.structures, group)
                by_dtype.setdefault(dtype, []).append(bucket)
        stacks = []
        for dtype, chosen in by_dtype.items():
            members = {slot.p for bucket in chosen for slot in bucket.slots}
            where = [i for i, p in enumerate(ps) if p in members]
            mine = KnownList(ps[i] for i in where)
            stack = kernel.stack(mine, chosen, model=model)
            stacks.append((dtype, stack, where))
        ps.known["stacks"] = (buckets, stacks)
        return stacks

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
        before = (self._epoch, *map(_layout_options, self.param_groups))
        super().load_state_dict(state_dict)
        if before != (self._epoch, *map(_layout_options, self.param_groups)):
            # Else the slabs stay where they are, for graphs that read them.
            for group in self.param_groups:
                self._settle(group)


def _layout_options(group: Group) -> tuple[Any, ...]:
    return tuple(group.get(name) for name in ("structure", "block_size", *_FORM_OPTIONS))
