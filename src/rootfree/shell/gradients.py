"""The gradients of a step: which exist, which are updated together, whether they are finite.

The result for a group is remembered and reused until something it depends on changes.

One number that is not finite would stay in momenta and factors for good. So all gradients, and a
given curvature, are checked before anything changes. On a CPU the host reads the answer. On other
devices the answer is a flag that stays there: kernels read it and write nothing, and the changes
of torch functions are undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rootfree.kernels.finite import DTYPES, FiniteLook
from rootfree.kernels.plan import kernels_run
from rootfree.shell.checks import OneOf
from rootfree.shell.options import checked_values
from rootfree.shell.schedules import schedule
from rootfree.shell.summary import named_groups
from rootfree.shell.work import Group, GroupMemory, Work, sorted_work

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer

_mode = OneOf(("skip", "raise", "propagate"))
# Damping and γ decide what the full-matrix methods keep, and how precisely.
_ZERO = ("momentum", "riemannian_momentum", "damping", "gamma")
_FACTORS = ("structure", "block_size", "matmul_dtype", "factor_dtype", "factor_norm")
_FORM = ("companion", "state_dtype", *_FACTORS, "init_scale", "safeguard", "rate_by_rank", "form")


def find_work(optimizer: RootFreeOptimizer) -> list[Work]:
    """What to update: parameters with usable gradients, and their state."""
    found: list[Work] = []
    agreement = optimizer._placing.agreement
    asks = agreement.asks and not torch.compiler.is_compiling()
    elsewhere = agreement.before_step(optimizer) if asks else {}
    for group in optimizer.param_groups:
        params, memory = group["params"], memory_of(optimizer, group)
        gs = [p.grad for p in params]
        if elsewhere:  # torch.compile before 2.13 does not support id() of a dict
            for i in elsewhere.get(id(group), ()):
                gs[i] = torch.zeros_like(params[i])
        forms, dues = _forms_of(gs, sharded=memory.sharded), dues_of(memory)
        due = {d for d, g in zip(dues, gs, strict=True) if g is not None}
        refresh = due.pop() if len(due) == 1 else None  # None: only some are due
        apart = optimizer._apart(memory)
        kinds: list[Any] = [
            None if form is None else (place, form, (refresh is None and d, apart and apart[i]))
            for i, (place, form, d) in enumerate(zip(memory.places, forms, dues, strict=True))
        ]
        work = next((work for pattern, work in memory.patterns if pattern == kinds), None)
        if work is None:
            at_once = optimizer._elements_at_once
            work = sorted_work(group, kinds, memory.rows, elements_at_once=at_once)
            memory.remember(kinds, work)
        for w in work:
            if w.sharded:
                w.take_parts(gs)
            else:
                w.gs = [cast("Tensor", gs[i]) for i in w.where]
            w.refresh = refresh if refresh is not None else dues[w.where[0]]
        found += work
    return found


def memory_of(optimizer: RootFreeOptimizer, group: Group) -> GroupMemory:
    """The memory of a group; made anew when anything that it depends on has changed."""
    params = group["params"]
    if torch.compiler.is_compiling():  # nothing to remember: the compiler keeps the graph
        rows = [optimizer.state[p] for p in params]
        return GroupMemory(group, [], params, places_of(params), rows)
    memory = optimizer._memories.get(id(group))
    if memory is not None and memory.group is group:
        options = memory.options
        if not all(map(is_, map(group.get, options), options.values())):
            memory.options = checked_values(optimizer, group)
    if (
        memory is not None
        and memory.group is group
        and len(params) == len(memory.params)
        and all(map(is_, params, memory.params))
        and memory.form == form_of(group)
        and memory.places == places_of(params, sharded=memory.sharded)
        and _holds(memory, optimizer.state)
    ):
        return memory
    return optimizer._remember(group)


def form_of(group: Group) -> list[Any]:
    """The options that a group's state depends on; of some, only whether they are zero."""
    return [group.get(name, 0.0) > 0 for name in _ZERO] + [group.get(name) for name in _FORM]


def dues_of(memory: GroupMemory) -> list[bool]:
    """Whether the next step refreshes the preconditioner, for each parameter."""
    # Diagonal methods have no clock. Fake tensors, which estimate memory, have no numbers: a
    # refresh needs the most memory.
    if memory.steps is None or isinstance(memory.steps, FakeTensor):
        return [memory.group.get("companion") is None] * len(memory.params)
    steps, every = memory.steps.tolist(), memory.group["update_every"]
    if isinstance(every, int):
        dues = [step % every == 0 for step in steps]
    else:
        dues = list(map(schedule(every), steps))
    for i, owner in memory.owners.items():  # a bias follows the weight of its joint pair
        dues[i] = dues[owner]
    return dues


def advance_clocks(optimizer: RootFreeOptimizer, work: Iterable[Work]) -> None:
    """Advance the clocks of updated parameters; diagonal methods and AdamW have none."""
    if torch.compiler.is_compiling():  # a diagonal method
        return
    for w in work:
        steps = optimizer._memories[id(w.group)].steps
        if steps is not None and len(w.where) == len(steps):
            steps += 1
        elif steps is not None:
            steps[w.where] += 1


def places_of(params: Sequence[Any], *, sharded: bool = False) -> list[tuple[Any, ...]]:
    """Device, dtype and shape of each parameter; of a sharded one, device and spec."""
    if not sharded:
        return [(p.device, p.dtype, p.shape) for p in params]
    # Any public attribute of a DTensor costs several times as much as one of a tensor, at every
    # step. `_spec` is not public; a test pins it.
    return [
        (p.device, p.dtype, p.shape)
        if (spec := getattr(p, "_spec", None)) is None
        else (p._local_tensor.device, spec)
        for p in params
    ]


def _forms_of(gs: Sequence[Any], *, sharded: bool) -> list[Any]:
    """Dtype and layout of each gradient, or its spec, which contains both."""
    specs = [getattr(g, "_spec", None) for g in gs] if sharded else [None] * len(gs)
    return [
        (g.dtype, g.layout) if spec is None and g is not None else spec
        for g, spec in zip(gs, specs, strict=True)
    ]


def _holds(memory: GroupMemory, state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
    """Whether the state still holds the remembered rows and tensors, by identity and position."""
    if not memory.params:
        return True
    try:
        ps, rows = memory.entries(list(state)), memory.entries(list(state.values()))
        found = [tensor for get, row in memory.held for tensor in get(row)]
    except (KeyError, IndexError):
        return False
    alike = all(map(is_, ps, memory.params)) and all(map(is_, rows, memory.rows))
    return alike and all(map(is_, found, memory.tensors))


class Watch:
    """Checks the gradients of a step before anything changes, and counts skipped steps."""

    def __init__(self, mode: str, *, fused: bool | None = None) -> None:
        self.mode: str = _mode("nonfinite", mode)
        self._fused = fused
        self.kernel = FiniteLook()
        self._counts: dict[torch.device, Tensor] = {}
        self._kernels: dict[torch.device, bool] = {}  # whether the kernel runs there
        #: replaces flags by those of all ranks; None: no other rank has the parameters
        self.over_ranks: Callable[[dict[torch.device, Tensor]], None] | None = None

    def look(
        self,
        work: Sequence[Work],
        groups: Sequence[dict[str, Any]],
        curvature: Sequence[tuple[Sequence[Tensor], Tensor]] = (),
    ) -> bool:
        """Whether to go on: False if the host knows that a number is not finite.

        Where only the device knows, `skip` in the work is its flag.  Changes work.

        `curvature`: parameters, and for each the largest number of its given curvature.
        """
        for w in work:
            w.skip = None
        flags = {} if self.mode == "propagate" else self._find_nonfinite(work, curvature)
        if self.mode == "raise":
            if any(map(bool, flags.values())):
                _refuse(groups, curvature)
        elif flags:
            # One device counts for all of them: a CPU, if there is one.
            device = ([*filter(host_reads, flags)] or [*flags])[0]
            self.count_on(device).add_(flags[device])
            if host_reads(device):
                return not flags[device]
            for w in work:
                w.skip = flags[w.ps[0].device]
        return True

    def _find_nonfinite(
        self, work: Sequence[Work], curvature: Sequence[tuple[Sequence[Tensor], Tensor]]
    ) -> dict[torch.device, Tensor]:
        """A flag on each device of the work: 1 if a number on any device is not finite, else 0.

        Ranks that share parameters get the same flags. Under DDP they do so without communication:
        an average over ranks is not finite on any of them. A curvature is the same on every rank.
        """
        found: dict[torch.device, list[Tensor]] = {}
        for w in work:
            if isinstance(w.ps[0], FakeTensor):  # estimates memory, has no numbers
                return {}
            found.setdefault(w.ps[0].device, []).extend(g for g in w.gs if g.numel() > 0)
        for _, largest in curvature:  # on the device of a parameter, checked with the gradients
            found.setdefault(largest.device, []).append(largest)
        flags = {device: self._flag(tensors, device) for device, tensors in found.items()}
        if self.over_ranks is not None:
            self.over_ranks(flags)
        if len(flags) > 1:
            votes = list(flags.values())
            flags = {device: torch.stack([v.to(device) for v in votes]).amax() for device in flags}
        return flags

    def _flag(self, gs: list[Tensor], device: torch.device) -> Tensor:
        """1 if a number is not finite, else 0: float32, on the device."""
        if not gs:
            return torch.zeros((), device=device)
        known = not host_reads(device) and {g.dtype for g in gs} <= DTYPES
        return self.kernel(gs) if known and self._has_kernel(gs[0]) else _plain_flag(gs)

    def _has_kernel(self, g: Tensor) -> bool:
        if torch.compiler.is_compiling():
            return False
        if g.device not in self._kernels:
            self._kernels[g.device] = kernels_run(g, self._fused)
        return self._kernels[g.device]

    def count_on(self, device: torch.device) -> Tensor:
        """How many steps a device skipped; made early, as a CUDA graph cannot make it."""
        if device not in self._counts:
            self._counts[device] = torch.zeros((), device=device)
        return self._counts[device]

    def counts(self) -> list[Tensor]:
        """How many steps each device has skipped so far."""
        return [count.clone() for count in self._counts.values()]

    @property
    def skipped(self) -> int:
        """How many steps were skipped; reading it waits for the devices."""
        return sum(map(int, self._counts.values()))


def host_reads(device: torch.device) -> bool:
    """Whether the host reads flags of a device: only where it need not wait for them."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def _plain_flag(tensors: list[Tensor]) -> Tensor:
    """1 if a number in tensors of one device is not finite, else 0: float32, on the device."""
    if host_reads(tensors[0].device):
        # Fast, and right if it says yes. If it says no, a sum of squares may have overflowed.
        finite = bool(_are_finite(torch._foreach_norm(tensors))) or _each_finite(tensors)
        return torch.tensor(0.0 if finite else 1.0, device="cpu")
    return 1 - _are_finite(torch._foreach_norm(tensors, math.inf)).float()


def _are_finite(norms: Sequence[Tensor]) -> Tensor:
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    return torch.stack(tuple(norms)).isfinite().all()


def _each_finite(gs: Sequence[Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in gs)


def _refuse(
    groups: Sequence[dict[str, Any]], curvature: Sequence[tuple[Sequence[Tensor], Tensor]]
) -> None:
    """Raise an error that names the gradient, or curvature, that is not finite."""
    for group, names in named_groups(groups):
        for name, p in zip(names, group["params"], strict=True):
            g = getattr(p.grad, "_local_tensor", p.grad)
            given = [
                number
                for owners, largest in curvature
                for owner, number in zip(owners, largest.reshape(-1), strict=True)
                if owner is p
            ]
            for what, numbers in {"gradient": [] if g is None else [g], "curvature": given}.items():
                if not _each_finite(numbers):
                    raise FloatingPointError(
                        f"the {what} of parameter {name} of shape {tuple(p.shape)} is not finite; "
                        "nothing was changed. nonfinite='skip' leaves such steps out"
                    )
    raise FloatingPointError("a gradient on another rank is not finite; nothing was changed")
