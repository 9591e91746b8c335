"""Ranks that share an optimizer's parameters agree: all of them do the same, or nothing.

Before groups are added, before every step and before state is loaded, ranks compare what they are
about to do, and whether an error keeps any of them from doing it. If they differ, all of them raise
an error before anything changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rootfree.placement.data_parallel import copies_under_ddp
from rootfree.placement.local import check_one_kind, has_copies, is_sharded
from rootfree.placement.meeting import go_alone, leave, meet
from rootfree.placement.placed_stack import Absent
from rootfree.placement.ranks import PROBLEM, PlacementError, Ranks
from rootfree.placement.sharded import OutsideError, Sharded, Sharing, sharing_ranks
from rootfree.shell.first_step import FirstStep
from rootfree.shell.gradients import memory_of
from rootfree.shell.said import description_of, labelled, parameters_in, plain_options
from rootfree.shell.work import Group, GroupMemory, check_gradient

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer

_ADDING = "adding a parameter group"


class _Shared(NamedTuple):
    """The ranks that have a parameter, and those of them that share its blocks with this one."""

    everyone: Ranks
    crew: Ranks
    by_blocks: bool  # False: every rank updates its own elements


class Agreement:
    """What an optimizer knows of the other ranks."""

    def __init__(self, option: Sharded | None) -> None:
        self._option = option
        self._met: dict[tuple[int, ...], Ranks] = {}
        #: None: only this rank has it. Not weak: modules cannot convert what has weak references
        self._shared: dict[Tensor, _Shared | None] = {}
        #: groups of ranks with common parameters, and the devices of those parameters
        self._devices: dict[Ranks, list[torch.device]] = {}
        self._memories: list[GroupMemory] = []
        self._usable: dict[int, list[Any]] = {}  # kinds of checked gradients, by id of the group
        self._absent: dict[int, Absent] = {}  # by id of the group
        self._telling = False  # whether other ranks may wait for this one to add its group
        self._first = FirstStep()
        self.asks = False  # whether the next step begins with `before_step`
        self.steps = 0

    @property
    def crews(self) -> list[Ranks]:
        """The groups of ranks that share blocks."""
        found = [each.crew for each in self._shared.values() if each and each.by_blocks]
        return list(dict.fromkeys(found))

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have parameters of this optimizer too."""
        return bool(self._devices)

    def knows(self, p: Tensor) -> bool:
        """Whether it is known which ranks have a parameter."""
        return p in self._shared

    def keep(self, params: Collection[Tensor]) -> None:
        """Forget all other parameters."""
        self._shared = {p: shared for p, shared in self._shared.items() if p in params}

    def join(
        self, params: Sequence[Tensor], group: Group, said: Mapping[str, Any], *, by_blocks: bool
    ) -> Ranks | None:
        """The ranks that share the blocks of these parameters; None: only this rank has them.

        All of them must ask. `said`: what must be the same on all of them beside the options of the
        group.
        """
        try:
            sharing = sharing_ranks(self._option, params)
        except OutsideError as error:
            if not copies_under_ddp(params):
                raise
            # Ranks in the mesh do not know of this, and wait in the backward pass.
            sharing = None
            self._first.refuse(str(error))
        ranks = None if sharing is None else self._together(sharing, params)
        if sharing is None or ranks is None:
            self._shared.update(dict.fromkeys(params))
            self._first.expect(params)
            self.asks = self.asks or self._first.asks
            return None
        self._telling = False  # from here on all ranks raise the same errors
        method = {"method": group.get("method")}  # compared first
        content = {**method, **said, **plain_options(group), **self._asked(group)}
        ranks.check_agree(_ADDING, content, about="a parameter group")
        crew = ranks if sharing.crew == sharing.everyone else self._acquainted(sharing.crew)
        self._shared.update(dict.fromkeys(params, _Shared(ranks, crew, by_blocks)))
        if ranks.world > 1:
            self._devices.setdefault(ranks, [])
            self.asks = True
        if not any(map(is_sharded, params)) and not ranks.is_everyone:
            self._first.compare()
            self.asks = True
        return crew

    def _together(self, sharing: Sharing, params: Sequence[Tensor]) -> Ranks | None:
        """All ranks that have the parameters; an error if some of them do not share them.

        None: the error has to wait for the first step.
        """
        known = tuple(sharing.everyone) in self._met
        if self._first.refuses and not known:
            return None
        about = description_of(params)
        verdict = None if known else meet(sharing.everyone, about, self._placement).verdict
        if verdict is None:
            return self._acquainted(sharing.everyone)
        leave(sharing.everyone)
        self._telling = False
        if not verdict.goes_on or any(map(is_sharded, params)):
            raise PlacementError(verdict.problem)
        self._first.refuse(verdict.problem)
        return None

    def _acquainted(self, ranks: list[int]) -> Ranks:
        known = tuple(ranks)
        if known not in self._met:
            self._met[known] = Ranks(ranks)
        return self._met[known]

    @property
    def _placement(self) -> str | None:
        return None if self._option is None else f"Sharded(replicas={self._option.replicas})"

    def _asked(self, group: Group) -> dict[str, Any]:
        """What ranks compare beside the options of a group."""
        names = [p[0] for p in group["params"] if isinstance(p, tuple)]
        return {"the names of the parameters": names, "placement": self._placement}

    @contextmanager
    def telling(self, params: Any) -> Iterator[None]:
        """Tell an error inside, where parameters are added, to the ranks that wait for this one.

        `params`: tensors or groups, as given to the optimizer.
        """
        inside, self._telling = self._telling, True
        try:
            yield
        except Exception as error:
            if self._telling and not inside:
                self._refuse(parameters_in(params), error)
            raise
        finally:
            self._telling = inside and self._telling

    def _refuse(self, params: list[Tensor], problem: Exception) -> None:
        """Tell ranks that may wait for this one why it does not add its parameters."""
        about = description_of(params)
        try:
            sharing = sharing_ranks(self._option, params)
        except (ValueError, PlacementError):  # it is not known which ranks wait
            sharing = None
        if sharing is None:
            go_alone(about, str(problem))
            return
        everyone = sharing.everyone
        if tuple(everyone) not in self._met:
            outcome = meet(everyone, about, self._placement)
            if not outcome.complete:  # no rank is there to be told
                leave(everyone)
                go_alone(about, str(problem))
                return
        self._acquainted(everyone).differ(_ADDING, {PROBLEM: str(problem)})

    def before_step(self, optimizer: RootFreeOptimizer) -> dict[int, list[int]]:
        """Compare options, clocks and gradients with other ranks; an error if they differ.

        Returns positions, by id of the group, of gradients that only other ranks have.
        """
        trouble: Exception | None = None
        groups = optimizer.param_groups
        seen: dict[int, list[bool]] = {}
        counts: list[list[int]] = [[] for _ in groups]
        self._absent, self.steps = {}, self.steps + 1
        try:
            memories = [memory_of(optimizer, group) for group in groups]
            self._find_devices(memories)
            counts = [[] if m.steps is None else m.steps.tolist() for m in memories]
            seen = {id(group): self._seen(group) for group in groups}
        except PlacementError:  # all ranks raise it
            raise
        except Exception as error:
            trouble = error
        if self._first.asks:
            trouble = self._first.ask(optimizer, counts, trouble)
            self.asks = self._first.asks or self.is_shared
        options = [{**plain_options(g), "step": n} for g, n in zip(groups, counts, strict=True)]
        problem = None if trouble is None else str(trouble)
        said = (options, optimizer._batch_counter is not None, problem)
        for ranks in self._devices:
            mine = [group for group in groups if self._concerns(ranks, group)]
            found = ranks.differ("step()", (said, [seen.get(id(group)) for group in mine]))
            if trouble is None and found is not None:
                ranks.check_alike([labelled(*each) for each, _ in found], about="step()")
                for n, group in enumerate(mine):
                    self._compare(ranks, group, [there[n] for _, there in found])
        if trouble is not None:
            raise trouble
        return {
            key: sorted({i for i, _ in absent if not seen[key][i]})
            for key, absent in self._absent.items()
        }

    def _find_devices(self, memories: list[GroupMemory]) -> None:
        """Look up the devices of all parameters, with or without gradients: they may move."""
        if len(memories) == len(self._memories) and all(map(is_, memories, self._memories)):
            return
        self._memories = memories
        for ranks in self._devices:
            mine = [memory for memory in memories if self._concerns(ranks, memory.group)]
            places = [place[0] for memory in mine for place in memory.places]
            self._devices[ranks] = list(dict.fromkeys(places))

    def _seen(self, group: Group) -> list[bool]:
        """Which gradients exist on this rank; an error if one of them is unusable."""
        gs = [p.grad for p in group["params"]]
        kinds = [g if g is None else (type(g), g.dtype, g.layout, g.shape) for g in gs]
        if kinds != self._usable.get(id(group)):
            for p, g in zip(group["params"], gs, strict=True):
                check_gradient(p)
                check_one_kind(p, p if g is None else g)
            self._usable[id(group)] = kinds
        return [g is not None for g in gs]

    def _concerns(self, ranks: Ranks, group: Group) -> bool:
        found = (self._shared.get(p) for p in group["params"])
        return any(each is not None and each.everyone is ranks for each in found)

    def _compare(self, ranks: Ranks, group: Group, table: list[list[bool]]) -> None:
        """Note where gradients of a group are missing; refuse this if copies would then differ.

        `table`: which gradients exist, for each rank.
        """
        absent: set[tuple[int, int]] = set()
        for i, (p, *flags) in enumerate(zip(group["params"], *table, strict=True)):
            shared = self._shared[p]
            if all(flags) or not any(flags) or shared is None:
                continue
            size = len(shared.crew.ranks)
            crews = [flags[n : n + size] for n in range(0, len(flags), size)]
            by_blocks = shared.by_blocks and crews.count(crews[0]) == len(crews)
            if not by_blocks and (shared.by_blocks or has_copies(p, ranks.world)):
                lacks, has = (ranks.ranks[flags.index(flag)] for flag in (False, True))
                raise PlacementError(
                    f"step(): the gradient of parameter {i} of shape {tuple(p.shape)} is missing "
                    f"on rank {lacks}, but not on rank {has}, and copies of the parameter would "
                    "become different"
                )
            absent |= {
                (i, r) for r, flag in enumerate(crews[0] if by_blocks else flags) if not flag
            }
        self._absent[id(group)] = frozenset(absent)

    def absent(self, group: Group) -> Absent:
        """Which of a group's gradients are missing in this step, and on which ranks."""
        return self._absent.get(id(group), frozenset())

    def check(
        self, what: str, problem: Exception | None, kind: type[Exception], **said: Any
    ) -> None:
        """Raise this rank's problem, or that of another rank as an error of this kind.

        `said`: must be the same on all ranks, if none has a problem.
        """
        text = None if problem is None else str(problem)
        for ranks in self._devices:
            found = ranks.differ(what, (text, said))
            others = [each for each, _ in found or () if each is not None]
            if problem is None and others:
                problem = kind(others[0])
            if problem is None and found is not None:
                ranks.check_alike([each for _, each in found], about=what)
        if problem is not None:
            raise problem

    def any_(self, flags: dict[torch.device, Tensor]) -> None:
        """Flags <- the largest on any rank.  All ranks must ask, with or without work."""
        for ranks, devices in self._devices.items():
            for device in devices:
                if device not in flags:
                    flags[device] = torch.zeros((), device=device)
                ranks.largest_(flags[device])
