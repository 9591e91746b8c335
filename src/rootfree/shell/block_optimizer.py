"""What the matrix methods share: parameters cut into blocks, blocks stacked into buckets.

A method says which axes get which structure, what state a stack of blocks needs, and which rule
turns gradients of the stack into a direction; gathering and the tail are the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rootfree.curvature import BlockCurvature, OuterProducts
from rootfree.kernels.graphs import GraphRecorder, Recordings
from rootfree.kernels.halves import joined
from rootfree.kernels.plan import State, Structures
from rootfree.kernels.stack import Part
from rootfree.layout.structured import flat_tiles, structured_tiles
from rootfree.layout.tiles import Tile
from rootfree.placement.local import is_sharded
from rootfree.placement.owners import Cut
from rootfree.rules import LEAST_DAMPING
from rootfree.shell import compiled_step
from rootfree.shell.block_layout import lay_out, stacks_of
from rootfree.shell.gradients import dues_of, memory_of
from rootfree.shell.groups import named
from rootfree.shell.inspection import direction_of, factors_of
from rootfree.shell.optimizer import RootFreeOptimizer, states
from rootfree.shell.parameter_state import parameter_state, product_dtype
from rootfree.shell.step_counts import count_, first_count, read_clocks, with_clocks
from rootfree.shell.summary import blocks_of
from rootfree.shell.work import Group, Work

# Directions are replayed from CUDA graphs if these take at most this part of the device's memory.
# Bytes per element: temporaries; with a given curvature also its copy and KᵀUK.
REPLAYED = 0.01
_BYTES, _BYTES_GIVEN = 8, 32


class BlockOptimizer(RootFreeOptimizer):
    """Base of the matrix methods; subclasses define `_block_state` and `_direction`."""

    _has_companions = True
    _elements_at_once = None  # buckets have all their members at once

    #: True: a parameter is one vector with a dense factor. False: every axis has a factor.
    _flat: ClassVar[bool] = False

    _handle: int  #: by which a compiled graph finds the optimizer

    #: kernels in place of `_direction`, and whether they accept a given curvature
    _kernel: ClassVar[Callable[..., None] | None] = None
    _kernel_takes_curvature: ClassVar[bool] = False

    _recorder: GraphRecorder | None = None  # one for all stacks: they never run at the same time

    _lay_out = lay_out  # in block_layout.py
    _factors, _direction_of = factors_of, direction_of  # in inspection.py

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        kept["state"] = defaultdict(dict, with_clocks(self._memories.values(), kept["state"]))
        return kept

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Give every optimizer its own handle, copies included."""
        made = super().__new__(cls)
        made._handle = compiled_step.new_handle(made)
        return made

    def _act(self, work: Work) -> None:
        kind = work.ps[0].device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):  # the method chooses its dtypes
                super()._act(work)
        else:
            super()._act(work)

    def _cuts(self, params: Sequence[Tensor], group: Group) -> list[Cut] | None:
        if self._of(group) is not self:
            return None
        if self._placement is not None or any(map(is_sharded, params)):
            self._pairs.check_apart(params)
        return [[each[1:] for each in self._cut(p, group)] for p in params]

    @abstractmethod
    def _block_state(self, p: Tensor, tile: Tile, structures: Structures, group: Group) -> State:
        """State of the tile's blocks; every tensor has the blocks as its first axis."""

    @staticmethod
    @abstractmethod
    def _direction(
        group: Group, structures: Structures, state: State, G: Tensor, H: BlockCurvature | None
    ) -> Tensor:
        """The rule: U of a stack of gradients; a given H first refreshes the state, in place."""

    def _products(self, p: Tensor, structures: Structures, group: Group) -> torch.dtype:
        """The dtype in which gradients are gathered and multiplied."""
        return product_dtype(p, structures, group)

    def _init_state(self, p: Tensor, group: Group) -> State:
        state: State = {}
        for prefix, tile, structures in self._cut(p, group):
            make = partial(self._block_state, p, structures=structures, group=group)
            blocks = self._placing.block_state(p, prefix, tile, make)
            state.update({prefix + name: tensor for name, tensor in blocks.items()})
        fill = {"momentum": 0.0} if group["momentum"] > 0 else {}
        state["step"] = first_count(p)
        like = self._placing.momentum_like(p)
        return {**state, **parameter_state(like, group, fill, salt=len(self.state))}

    def _cut(self, p: Tensor, group: Group) -> list[tuple[str, Tile, Structures]]:
        """How `p` is cut: the prefix of the keys of each tile, the tile, structures of its axes."""
        if p.numel() == 0 or self._pairs.owner(p) is not p:
            return []
        shape, size = self._pairs.shape_of(p), group["block_size"]
        if self._flat:
            tiles = flat_tiles(shape, block_size=size)
        else:
            structure = group.get("structure", "dense")
            tiles = structured_tiles(shape, structure=structure, block_size=size)
        return [(f"block{i}.", *each) for i, each in enumerate(tiles)]

    def _describe(self, p: Tensor, group: Group) -> str:
        return blocks_of(p, self._cut(p, group), self._pairs)

    def _checked_options(self, group: Group) -> dict[str, Any]:
        checked = super()._checked_options(group)
        for what, p in named(group["params"]):
            try:  # refuses an impossible structure or block size before anything changes
                self._cut(p, {**group, **checked})
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from error
        return checked

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The checkpoint, as in torch.optim; factors are whole, whatever form kernels use."""
        saved = super().state_dict()
        state = saved["state"]  # wrappers may keep their own entries under other keys
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for n in range(len(params)) if n in state]
        rows = with_clocks(self._memories.values(), {params[n]: joined(state[n]) for n in numbers})
        if self._placing.homes:
            rows = self._placing.saved(rows, numbers)
        return {**saved, "state": {**state, **{n: rows[params[n]] for n in numbers}}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a checkpoint in; refreshes continue with its clock."""
        super().load_state_dict(state_dict)
        for memory in self._memories.values():
            read_clocks(memory)

    @property
    def refreshes_next(self) -> bool:
        """Whether the next step refreshes a preconditioner, and so uses the curvature."""
        return any(any(dues_of(memory_of(self, group))) for group in self.param_groups)

    def _reads_numbers(self, work: Work) -> bool:
        return work.stacks is not None and all(stack.by_kernels for _, stack in work.stacks)

    def _send_numbers(self, work: Work) -> None:
        stacks = [stack for _, stack in work.stacks or [] if stack.numbers is not None]
        if stacks:
            group = self._settings(work.group, work.where[0])
            lam, gamma = max(group["damping"], LEAST_DAMPING), group.get("gamma", 1.0)
            rates, tail = (self._terms(group), self._rate(group), lam, gamma), self._tail(group)
            for stack in stacks:
                stack.send(tail, rates)

    @staticmethod
    def _rate(group: Group) -> float:
        """β₂ of a refresh."""
        return cast("float", group["precond_lr"])

    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient; a single op under torch.compile."""
        if torch.compiler.is_compiling() and closure is None and compiled_step.fits_in_graph(self):
            return compiled_step.step_in_graph(self)
        return self._plain_step(closure)

    def _update(self, work: Work) -> None:
        group, refresh = self._settings(work.group, work.where[0]), work.refresh
        if work.stacks is None:
            work.stacks = stacks_of(self, work)
        self._send_numbers(work)
        curvature = partial(self._curvature_of, B=self._terms(group)) if refresh else None
        for where, stack in work.stacks:
            gs = [work.gs[i] for i in where]
            if work.sharded:  # FSDP may have moved the shards
                stack.ps = [work.ps[i] for i in where]
            ms, counters = states(work, "momentum", where), states(work, "rounding", where)
            with torch.cuda.device_of(gs[0]):
                stack.tell(work.skip)
                stack.gather_(gs, squares=refresh)  # G of all blocks
                stack.precondition_(group, curvature)  # G <- U; H, if due, moves the factors first
                stack.descend_(ms, counters, self._tail(group))  # M <- α₁M + U;  W <- W - β₁M
        if (memory := self._memories[id(work.group)]).counts:
            count_(memory, work)

    def _curvature_of(self, part: Part, *, B: int) -> BlockCurvature:
        """H of the blocks of a part."""
        if self._curvature is None:
            return OuterProducts(part.G, weight=B)
        tiles = [(slot.p, slot.tile) for slot in part.share.slots]
        return self._curvature.blocks(tiles, part.G, B=B)

    def _replays(self, p: Tensor) -> Recordings | None:
        """Where directions of small models are recorded: they only touch the optimizer's memory."""
        elements = sum(p.numel() for group in self.param_groups for p in group["params"])
        given = self._curvature is not None
        if self._kernel is None or (given and not self._kernel_takes_curvature) or not p.is_cuda:
            return None
        needed = (_BYTES_GIVEN if given else _BYTES) * elements
        if needed > REPLAYED * torch.cuda.get_device_properties(p.device).total_memory:
            return None
        self._recorder = self._recorder or GraphRecorder()
        return Recordings(self._recorder)
