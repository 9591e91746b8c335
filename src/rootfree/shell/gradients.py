"""The gradients of a step: which there are, what updates them together, whether they are finite.

What was found of a group is remembered, and looked up again as long as nothing that it depends on
has changed.

One number that is not finite would stay in momenta and factors for good. Whether there is one is
asked of all gradients, and of the curvature that was given, before anything changes. On a CPU the
answer is read. Elsewhere it stays on the device, as a flag: kernels read it and write nothing, and
what torch functions changed is put back.
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
# What schedules make of these is theirs, as in torch: below zero they turn a step, no more.
_FREE = ("lr", "weight_decay")


def find_work(optimizer: RootFreeOptimizer) -> list[Work]:
    """What there is to update, with gradients that were found usable and state in its place."""
    found: list[Work] = []
    agreed, elsewhere = optimizer._agreed, {}
    if agreed is not None and agreed.asks and not torch.compiler.is_compiling():
        elsewhere = agreed.before_step(optimizer)
    for group in optimizer.param_groups:
        params = group["params"]
        memory = None if torch.compiler.is_compiling() else memory_of(optimizer, group)
        places = places_of(params) if memory is None else memory.places
        gs = [p.grad for p in params]
        if elsewhere:  # torch.compile before 2.13 knows no id() of a dict
            for i in elsewhere.get(id(group), ()):
                gs[i] = torch.zeros_like(params[i])
        forms = _forms_of(gs, sharded=memory is not None and memory.sharded)
        dues = [True] * len(gs) if memory is None else dues_of(memory)
        due = {d for d, g in zip(dues, gs, strict=True) if g is not None}
        refresh = due.pop() if len(due) == 1 else None  # None: some of them
        kinds: list[Any] = [
            None if form is None else (place, form, refresh is None and d)
            for place, form, d in zip(places, forms, dues, strict=True)
        ]
        known = [] if memory is None else memory.patterns
        work = next((work for pattern, work in known if pattern == kinds), None)
        if work is None:
            rows = [optimizer.state[p] for p in params] if memory is None else memory.rows
            work = sorted_work(group, kinds, rows, elements_at_once=optimizer._elements_at_once)
            if memory is not None:
                memory.remember(kinds, work)
        for w in work:
            if not w.meshes:
                w.gs = [cast("Tensor", gs[i]) for i in w.where]
            else:
                w.take_parts(gs)
            w.refresh = refresh if refresh is not None else dues[w.where[0]]
        found += work
    return found


def memory_of(optimizer: RootFreeOptimizer, group: Group) -> GroupMemory:
    """What is known of a group: made anew when anything that it depends on is not as it was."""
    memory, params = optimizer._memories.get(id(group)), group["params"]
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


def checked_values(optimizer: RootFreeOptimizer, group: Group) -> Group:
    """The options of a group, found to be allowed: users and schedulers set them at any time."""
    method = optimizer._of(group)
    if ("damping" if method is optimizer else "betas") not in group:
        raise ValueError(
            "companion must stay what it was when the group was added, got "
            f"{group.get('companion')!r}: the group has not the options of "
            f"{type(method).__name__}. Make a new optimizer"
        )
    values = {name: group[name] for name in method.options if name in group and name not in _FREE}
    if len(values) + len(_FREE) == len(method.options):  # else it was pickled by an older version
        # Which blocks the parameters are cut into is asked when these, or their form, change.
        method._checked_options({**values, **dict.fromkeys(_FREE, 0.0), "params": []})
    return values


def form_of(group: Group) -> list[Any]:
    """What the form of a group's state depends on: options, and of some whether they are zero."""
    return [group.get(name, 0.0) > 0 for name in _ZERO] + [group.get(name) for name in _FORM]


def dues_of(memory: GroupMemory) -> list[bool]:
    """Which parameters have their preconditioner refreshed by the next step."""
    # Diagonal methods have no clock, and fake tensors, to estimate memory, no numbers: the most.
    if memory.steps is None or isinstance(memory.steps, FakeTensor):
        return [memory.group.get("companion") is None] * len(memory.params)
    steps, every = memory.steps.tolist(), memory.group["update_every"]
    if isinstance(every, int):
        dues = [step % every == 0 for step in steps]
    else:
        dues = list(map(schedule(every), steps))
    for i, owner in memory.owners.items():  # a joint pair is due as one
        dues[i] = dues[owner]
    return dues


def advance_clocks(optimizer: RootFreeOptimizer, work: Iterable[Work]) -> None:
    """Count a step for what was updated; diagonal methods and AdamW have no clock."""
    if torch.compiler.is_compiling():  # a diagonal method
        return
    for w in work:
        memory = optimizer._memories.get(id(w.group))
        if memory is None or memory.steps is None:
            continue
        if len(w.where) == len(memory.steps):
            memory.steps += 1
        else:
            memory.steps[w.where] += 1


def places_of(params: Sequence[Any], *, sharded: bool = False) -> list[tuple[Any, ...]]:
    """Where and what parameters are: device, dtype and shape; if sharded, the spec has the rest."""
    if not sharded:
        return [(p.device, p.dtype, p.shape) for p in params]
    # Any other attribute of a DTensor costs several times as much as one of a tensor, at every
    # step. Not public, and pinned by a test.
    return [
        (p.device, p.dtype, p.shape)
        if (spec := getattr(p, "_spec", None)) is None
        else (p._local_tensor.device, spec)
        for p in params
    ]


def _forms_of(gs: Sequence[Any], *, sharded: bool) -> list[Any]:
    """Dtype and layout of gradients, or the specs that have these."""
    specs = [getattr(g, "_spec", None) for g in gs] if sharded else [None] * len(gs)
    return [
        (g.dtype, g.layout) if spec is None and g is not None else spec
        for g, spec in zip(gs, specs, strict=True)
    ]


def _holds(memory: GroupMemory, state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
    """Whether the state has the very rows and tensors that are remembered, in their places."""
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
    """Looks at the gradients of a step before anything changes, and counts what is left out."""

    def __init__(self, mode: str, *, fused: bool | None = None) -> None:
        self.mode: str = _mode("nonfinite", mode)
        self._fused = fused
        self.kernel = FiniteLook()
        self._counts: dict[torch.device, Tensor] = {}
        self._kernels: dict[torch.device, bool] = {}  # whether the kernel runs there
        #: changes flags to those of all ranks; None: nobody else has the parameters
        self.over_ranks: Callable[[dict[torch.device, Tensor]], None] | None = None

    def look(
        self,
        work: Sequence[Work],
        groups: Sequence[dict[str, Any]],
        curvature: Sequence[tuple[Sequence[Tensor], Tensor]] = (),
    ) -> bool:
        """Whether to go on: not where the host knows that a number is not finite.

        Where it does not know, `skip` in the work says so on the device.  Changes work.

        `curvature`: parameters, and for each the largest number of what was given for it.
        """
        for w in work:
            w.skip = None
        flags = {}
        if self.mode != "propagate":
            flags = self._find_nonfinite(work, [tensor for _, tensor in curvature])
        if self.mode == "raise":
            if any(map(bool, flags.values())):
                _refuse(groups, curvature)
        elif flags:
            # One device counts: a CPU, if there is one, for all of them.
            device = ([*filter(host_reads, flags)] or [*flags])[0]
            self.count_on(device).add_(flags[device])
            if host_reads(device):
                return not flags[device]
            for w in work:
                w.skip = flags[w.ps[0].device]
        return True

    def _find_nonfinite(
        self, work: Sequence[Work], curvature: Sequence[Tensor]
    ) -> dict[torch.device, Tensor]:
        """On each device of the work: 1 if any number, on whatever device, is not finite, else 0.

        Ranks that have parameters in common find the same. Without that (DDP), a gradient that was
        averaged over ranks is not finite on any of them. A curvature is the same on every rank.
        """
        found: dict[torch.device, list[Tensor]] = {}
        for w in work:
            if isinstance(w.ps[0], FakeTensor):  # to estimate memory: there are no numbers
                return {}
            found.setdefault(w.ps[0].device, []).extend(g for g in w.gs if g.numel() > 0)
        for tensor in curvature:  # on the device of a parameter, and looked at with the gradients
            found.setdefault(tensor.device, []).append(tensor)
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
        """How many steps a device left out; there before it is needed, which may be in a graph."""
        if device not in self._counts:
            self._counts[device] = torch.zeros((), device=device)
        return self._counts[device]

    def counts(self) -> list[Tensor]:
        """How many steps each device left out, until now."""
        return [count.clone() for count in self._counts.values()]

    @property
    def skipped(self) -> int:
        """How many steps were left out; reading it waits for the devices."""
        return sum(int(count) for count in self._counts.values())


def host_reads(device: torch.device) -> bool:
    """Whether the host reads flags on a device: where that waits for nothing."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def _plain_flag(tensors: list[Tensor]) -> Tensor:
    """1 if a number in tensors of one device is not finite, else 0: float32, on the device."""
    if host_reads(tensors[0].device):
        # Fast, and sure if it says yes; sums of squares overflow where no number does.
        finite = bool(_are_finite(torch._foreach_norm(tensors))) or _each_finite(tensors)
        return torch.tensor(0.0 if finite else 1.0)
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
    """Say which gradient, or curvature, is not finite."""
    for group, names in named_groups(groups):
        for name, p in zip(names, group["params"], strict=True):
            g = getattr(p.grad, "_local_tensor", p.grad)
            given = [
                number
                for owners, numbers in curvature
                for owner, number in zip(owners, numbers.reshape(-1), strict=True)
                if owner is p
            ]
            bad = {"gradient": g is not None and not _each_finite([g])}
            bad["curvature"] = not _each_finite(given)
            for what in filter(bad.__getitem__, bad):
                raise FloatingPointError(
                    f"the {what} of parameter {name} of shape {tuple(p.shape)} is not finite; "
                    "nothing was changed. nonfinite='skip' leaves such steps out"
                )
    raise FloatingPointError("a gradient on another rank is not finite; nothing was changed")
