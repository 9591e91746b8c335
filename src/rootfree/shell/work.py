"""Which parameters a step has to update, and what is remembered of a group between steps."""

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
from rootfree.placement.local import local, local_parts, local_row, meshes_of, within

Tensors = list[Tensor]
Group = dict[str, Any]
#: of a parameter: None without a gradient, else what decides with which others it is updated
Kind = tuple[Any, ...] | None

# Patterns of missing gradients that are remembered for a group.
MOST_PATTERNS = 4


@dataclass(eq=False)
class Work:
    """Parameters of one group, device and dtype that are updated together; of sharded ones the
    part that is here."""

    group: Group
    where: list[int]  # positions in the group
    ps: Tensors
    rows: list[dict[str, Tensor]]  # their state
    gs: Tensors = field(default_factory=list)  # of this step
    refresh: bool = True  # whether this step refreshes the preconditioners
    stacks: list[tuple[list[int], Stack]] | None = None  # with positions in ps
    kernel: FusedDiagonal | None = None
    withins: list[Within | None] | None = None  # what ps are parts of; None: all are whole
    meshes: list[Any] = field(default_factory=list)  # of sharded parameters; empty: none is
    skip: Tensor | None = None  # on the device: not 0 where nothing may change; None: it may
    #: whose curvature is asked for, with the shapes that it is of; empty: nobody has asked yet
    matrices: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)
    ones: Tensor | None = None  # what the counts of the group's parameters grow by in a step

    params: Tensors = field(init=False)  # the parameters, of sharded ones the whole

    def __post_init__(self) -> None:
        self.params = [self.group["params"][i] for i in self.where]

    @property
    def offsets(self) -> list[tuple[int, ...] | None]:
        """Where ps begin in the parameters; None: it is all of one."""
        found = self.withins or [None] * len(self.ps)
        return [None if each is None else each.offsets for each in found]

    def take_parts(self, gs: Sequence[Tensor | None]) -> None:
        """Take what is here of this step's gradients, and of the parameters, from the group."""
        params = self.group["params"]
        # FSDP may have moved its shards: they are looked up anew.
        self.ps[:], self.gs = local_parts(
            [params[i] for i in self.where], [gs[i] for i in self.where]
        )


@dataclass(eq=False)
class GroupMemory:
    """What is remembered of a group, and what that depends on."""

    group: Group
    form: list[Any]  # options that the form of the state depends on
    params: Tensors
    places: list[Any]  # device, dtype and shape of each, as `places_of` has them
    rows: list[dict[str, Tensor]]  # state[p] of each
    sharded: bool = False  # whether any is
    names: list[str] = field(default_factory=list)  # of each; empty: they have none
    options: Group = field(default_factory=dict)  # those that were found to be allowed
    held: list[tuple[Callable[..., Tensors], dict[str, Tensor]]] = field(default_factory=list)
    tensors: Tensors = field(default_factory=list)  # all of theirs, as `held` gets them
    entries: Callable[[Any], Sequence[Any]] = tuple  # those of the params among all of the state
    buckets: list[Bucket[Plan]] = field(default_factory=list)
    steps: Tensor | None = None  # the clock of each, on the CPU
    counts: dict[torch.device, Tensor] = field(default_factory=dict)  # of updates, where they are
    owners: dict[int, int] = field(default_factory=dict)  # of biases in joint pairs: the weight
    patterns: list[tuple[list[Kind], list[Work]]] = field(default_factory=list)

    def remember(self, kinds: list[Kind], work: list[Work]) -> None:
        """Remember the work for these kinds, and forget the oldest."""
        self.patterns[:] = [(kinds, work), *self.patterns[: MOST_PATTERNS - 1]]


def sorted_work(
    group: Group,
    kinds: Sequence[Kind],
    rows: Sequence[dict[str, Tensor]],
    *,
    elements_at_once: int | None,
) -> list[Work]:
    """Parameters with gradients, found usable, by kind; on a CPU in handy portions."""
    params = group["params"]
    by_kind: dict[Any, list[int]] = {}
    for i, (p, kind) in enumerate(zip(params, kinds, strict=True)):
        if kind is not None and p.numel() > 0:
            check_gradient(p)
            (device, *_), _, refresh = kind
            by_kind.setdefault((device, p.dtype, refresh), []).append(i)
    work = []
    for (device, _, refresh), where in by_kind.items():
        limit = elements_at_once if device.type == "cpu" else None
        for part in [where] if limit is None else _portions(params, where, limit):
            ps, mine = [params[i] for i in part], [rows[i] for i in part]
            if meshes := meshes_of(ps):
                found = [within(p) for p in ps]
                withins = None if all(each is None for each in found) else found
                ps, mine = [*map(local, ps)], [*map(local_row, mine)]
                work.append(Work(group, part, ps, mine, withins=withins, meshes=meshes))
            else:
                work.append(Work(group, part, ps, mine))
            work[-1].refresh = refresh
    return work


def portions_of(work: Work, limit: int) -> list[Work]:
    """The same work in portions of at most `limit` elements (or one larger parameter)."""
    parts = _portions(work.ps, list(range(len(work.ps))), limit)
    return [
        replace(
            work,
            where=[work.where[i] for i in part],
            ps=[work.ps[i] for i in part],
            rows=[work.rows[i] for i in part],
            gs=[work.gs[i] for i in part],
        )
        for part in parts
    ]


def _portions(params: Tensors, where: list[int], limit: int) -> Iterable[list[int]]:
    """Consecutive parameters with at most `limit` elements together (or one larger one)."""
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
    if g is not None and g.shape != p.shape:  # left from before p.data was replaced
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(p.shape)} has shape {tuple(g.shape)}"
        )
