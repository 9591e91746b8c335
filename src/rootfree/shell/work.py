"""What a step has to update, and what is remembered of a group between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rootfree.kernels.diagonal import FusedDiagonal
from rootfree.kernels.plan import Plan
from rootfree.kernels.rounding import Within
from rootfree.kernels.stack import Stack
from rootfree.layout.buckets import Bucket
from rootfree.placement.local import is_sharded, local, local_parts, local_row, within

Tensors = list[Tensor]
Group = dict[str, Any]
#: of a parameter: None without a gradient; parameters of one kind are updated together
Kind = tuple[Any, ...] | None

# How many patterns of missing gradients are remembered for a group.
MOST_PATTERNS = 4


@dataclass(eq=False)
class Work:
    """Parameters of one group, device and dtype that are updated together.

    Of sharded parameters it has the local part.
    """

    group: Group
    where: list[int]  # positions in the group
    ps: Tensors
    rows: list[dict[str, Tensor]]  # their state
    gs: Tensors = field(default_factory=list)  # of this step
    refresh: bool = True  # whether this step refreshes the preconditioners
    stacks: list[tuple[list[int], Stack]] | None = None  # with positions in ps
    kernel: FusedDiagonal | None = None
    withins: list[Within | None] | None = None  # what ps are parts of; None: all are whole
    sharded: bool = False  # whether any of the parameters is
    skip: Tensor | None = None  # on the device: not 0 if nothing may change; None: no check
    #: parameters whose curvature is needed, with its shapes; empty: not looked up yet
    matrices: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)
    ones: Tensor | None = None  # what a step adds to the counts of the group's parameters

    params: Tensors = field(init=False)  # the parameters; sharded ones are DTensors here

    def __post_init__(self) -> None:
        self.params = [self.group["params"][i] for i in self.where]

    @property
    def offsets(self) -> list[tuple[int, ...] | None]:
        """Where each of ps begins in its parameter; None: it is the whole parameter."""
        found = self.withins or [None] * len(self.ps)
        return [None if each is None else each.offsets for each in found]

    def take_parts(self, gs: Sequence[Tensor | None]) -> None:
        """Take the local parts of this step's gradients, and of the parameters."""
        # FSDP may have moved the shards, so they are looked up at every step.
        self.ps[:], self.gs = local_parts(self.params, [gs[i] for i in self.where])


@dataclass(eq=False)
class GroupMemory:
    """What is remembered of a group, and what that depends on."""

    group: Group
    form: list[Any]  # options that the state depends on, from `form_of`
    params: Tensors
    places: list[Any]  # device, dtype and shape of each, from `places_of`
    rows: list[dict[str, Tensor]]  # state[p] of each
    sharded: bool = False  # whether any is
    names: list[str] = field(default_factory=list)  # of each; empty: they have none
    options: Group = field(default_factory=dict)  # those that were found to be allowed
    held: list[tuple[Callable[..., Tensors], dict[str, Tensor]]] = field(default_factory=list)
    tensors: Tensors = field(default_factory=list)  # all tensors of the rows, in `held`'s order
    entries: Callable[[Any], Sequence[Any]] = tuple  # picks those of params from all of the state
    buckets: list[Bucket[Plan]] = field(default_factory=list)
    steps: Tensor | None = None  # the clock of each, on the CPU
    counts: dict[torch.device, Tensor] = field(default_factory=dict)  # updates, by device
    owners: dict[int, int] = field(default_factory=dict)  # bias of a joint pair -> its weight
    patterns: list[tuple[list[Kind], list[Work]]] = field(default_factory=list)

    def remember(self, kinds: list[Kind], work: list[Work]) -> None:
        """Remember the work for these kinds; forget the oldest pattern."""
        self.patterns = [(kinds, work), *self.patterns[: MOST_PATTERNS - 1]]


def sorted_work(
    group: Group,
    kinds: Sequence[Kind],
    rows: Sequence[dict[str, Tensor]],
    *,
    elements_at_once: int | None,
) -> list[Work]:
    """Parameters with usable gradients, grouped by kind; on a CPU in portions."""
    params = group["params"]
    by_kind: dict[Any, list[int]] = {}
    for i, (p, kind) in enumerate(zip(params, kinds, strict=True)):
        if kind is not None and p.numel() > 0:
            check_gradient(p)
            (device, *_), _, apart = kind
            by_kind.setdefault((device, p.dtype, apart), []).append(i)
    work = []
    for (device, *_), where in by_kind.items():
        limit = elements_at_once if device.type == "cpu" else None
        for part in [where] if limit is None else _portions(params, where, limit):
            ps, mine = [params[i] for i in part], [rows[i] for i in part]
            withins: list[Within | None] = []
            if sharded := any(map(is_sharded, ps)):
                withins = [within(p) for p in ps]
                ps, mine = [*map(local, ps)], [*map(local_row, mine)]
            parts = withins if any(withins) else None
            work.append(Work(group, part, ps, mine, withins=parts, sharded=sharded))
    return work


def portions_of(work: Work, limit: int) -> list[Work]:
    """The same work in portions of at most `limit` elements, or of one larger parameter."""
    parts = _portions(work.ps, list(range(len(work.ps))), limit)
    return [
        replace(
            work,
            where=[work.where[i] for i in part],
            ps=[work.ps[i] for i in part],
            rows=[work.rows[i] for i in part],
            gs=[work.gs[i] for i in part],
            withins=None if work.withins is None else [work.withins[i] for i in part],
        )
        for part in parts
    ]


def _portions(params: Tensors, where: list[int], limit: int) -> Iterable[list[int]]:
    """Consecutive parameters with at most `limit` elements together, or one larger one."""
    portions: list[list[int]] = []
    room = 0
    for i in where:
        if not portions or params[i].numel() > room:
            portions.append([])
            room = limit
        portions[-1].append(i)
        room -= params[i].numel()
    return portions


def check_gradient(p: Tensor) -> None:
    """Refuse gradients that no method here can use."""
    g = p.grad
    if g is not None and (g.layout != torch.strided or g.is_complex()):
        kind = "complex" if g.is_complex() else str(g.layout).removeprefix("torch.")
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is {kind}; "
            "only dense real gradients are supported (use sparse=False in embeddings)"
        )
    if g is not None and g.shape != p.shape:  # p.data was replaced since
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(p.shape)} has shape {tuple(g.shape)}"
        )
