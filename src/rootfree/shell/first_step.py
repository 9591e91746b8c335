"""What a rank checks before the first step with parameters that it shares with no other rank.

Another rank may be configured to share these parameters: then one of the two is wrong. And copies
under `DistributedDataParallel`, which only averages gradients, stay equal only if all ranks do the
same. Both are checked once, by notes in the store that connected the ranks. The backward pass has
synchronised the ranks just before, so no rank waits for long.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rootfree.placement.data_parallel import copies_under_ddp
from rootfree.placement.meeting import Comparison, forget, go_alone, has_store, missed
from rootfree.placement.processes import PATIENCE
from rootfree.placement.ranks import PROBLEM, PlacementError, difference
from rootfree.shell.said import COUNTING, asked, description_of, plain_options

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer

_PARAMETER = "parameter "
_LATE = (
    "ranks with copies of the parameters under DistributedDataParallel compare before their first "
    f"step() what they were told, but others did not do so within {PATIENCE:.0f} seconds: they are "
    "late, or have not added the same parameters. This rank goes on"
)
# Between two steps of a rank, the backward pass has waited for all others.
_PASSED = (
    "step(): ranks with copies of the parameters under DistributedDataParallel took a step without "
    "comparing what they were told with this rank: they have not added the same parameters"
)


class FirstStep:
    """Checks that are still to be made, and those without an answer yet."""

    def __init__(self) -> None:
        self._new: list[str] = []  # descriptions of parameters that are not checked yet
        self._compares = False  # whether to compare with the ranks that have copies
        self._open: list[Comparison] = []
        self._compared = False  # whether an earlier comparison was complete
        self._refused: str | None = None

    @property
    def asks(self) -> bool:
        """Whether the next step has anything to check."""
        return self._compares or bool(self._open)

    @property
    def refuses(self) -> bool:
        """Whether the next step will raise an error."""
        return self._refused is not None

    def refuse(self, problem: str) -> None:
        """Raise this at the first step, on all ranks, instead of now on this one alone.

        The others may already wait for this rank in the backward pass, and must get to their step.
        """
        self._refused = problem
        warnings.warn(f"{problem}. The first step will be an error on every rank", stacklevel=2)

    def expect(self, params: Sequence[Tensor]) -> None:
        """Note that this rank adds parameters that it shares with no other."""
        about = description_of(params)
        if go_alone(about):
            self._new.append(about)
            self.compare()

    def compare(self) -> None:
        """Compare, at the next step, with ranks that may have copies of the parameters."""
        self._compares = True

    def ask(
        self,
        optimizer: RootFreeOptimizer,
        counts: Sequence[Sequence[int]],
        trouble: Exception | None,
    ) -> Exception | None:
        """The error that keeps this rank, or another, from its step; None: there is none.

        `counts`: the steps taken so far, by group; `trouble`: an error found on this rank already.
        """
        refused = next(filter(None, [self._refused, *map(missed, self._new)]), None)
        mine = trouble or (None if refused is None else PlacementError(refused))
        if self._compares:
            self._open = list(_comparisons(optimizer, counts, mine))
            if not all(each.wait() for each in self._open):
                warnings.warn(_LATE, stacklevel=2)
        late = [each for each in self._open if not each.is_over()]
        found = [each.found() for each in self._open]  # after `late`: what is over has an answer
        if late and self._compared and not self._compares:
            found.append(_PASSED)
        if self._refused and self._open and not late:  # all ranks know of it
            forget(self._new)
        mine = mine or next((PlacementError(each) for each in found if each is not None), None)
        if mine is None:  # else the next step checks again
            self._new, self._open, self._compares = [], late, False
            self._compared = self._compared or not late
        return mine


def _comparisons(
    optimizer: RootFreeOptimizer, counts: Sequence[Sequence[int]], mine: Exception | None
) -> Iterator[Comparison]:
    """A comparison with each group of ranks that has copies of parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for ranks, names in copies_under_ddp(params).items() if has_store() else ():
        said = dict(_said(optimizer, names, counts)) if mine is None else {PROBLEM: str(mine)}
        yield Comparison(ranks, said, _difference)


def _said(
    optimizer: RootFreeOptimizer, names: Mapping[int, str], counts: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Any]]:
    """Labels and values that must be the same on all ranks with copies of these parameters."""
    yield "method", type(optimizer).__name__
    yield from asked(optimizer).items()
    yield COUNTING, optimizer._batch_counter is not None
    groups = [
        (group, steps)
        for group, steps in zip(optimizer.param_groups, counts, strict=True)
        if any(id(p) in names for p in group["params"])
    ]
    for n, (group, steps) in enumerate(groups):
        known = {"companion", *optimizer._of(group).options}
        for name, value in plain_options(group).items():
            if name in known:  # other keys are the user's, and may differ between ranks
                yield f"{name} of parameter group {n}", value
        yield f"step of parameter group {n}", sorted({*steps})
        for p in group["params"]:
            if id(p) in names:
                lacks = "" if p.grad is not None else ", without a gradient"
                yield f"{_PARAMETER}{names[id(p)]}", f"in group {n}{lacks}"


def _difference(first: tuple[int, dict[str, Any]], mine: tuple[int, dict[str, Any]]) -> str | None:
    """In words.  Ranks without a common parameter have divided them, and need not agree."""
    params = [{key for key in each if key.startswith(_PARAMETER)} for _, each in (first, mine)]
    if all(params) and not set.intersection(*params):
        return None
    return difference([first, mine], about="step()")
