"""What the storage says about a trial: its attempts, each a trial of Optuna, and how they ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from rootfree_lab.files.records import Record
from rootfree_lab.search.outcomes import COMPLETED, DIED, DIVERGED, ERROR, MEMORY, PRUNED
from rootfree_lab.search.settings import Slot
from rootfree_lab.search.spaces import Settings

STATES = {COMPLETED: TrialState.COMPLETE, DIVERGED: TrialState.PRUNED, PRUNED: TrialState.PRUNED}


@dataclass(frozen=True)
class Attempt:
    """One trial of Optuna, and what its process has noted of it."""

    trial: FrozenTrial
    slot: Slot
    outcome: str = ""
    message: str = ""
    alone: bool = False  # no other trial ran beside it on its machine
    worker: str = ""
    beat: Any = 0  # changes while its process lives, as do its points
    record: Record | None = None

    @property
    def id(self) -> int:
        return self.trial._trial_id

    @property
    def running(self) -> bool:
        return not self.trial.state.is_finished()

    @property
    def settings(self) -> Settings:
        return dict(self.trial.params)


@dataclass(frozen=True)
class Status:
    """Where one trial of the search stands."""

    slot: Slot
    attempts: tuple[Attempt, ...]
    forgiven: int = 0  # attempts with a lower number are not held against it

    @property
    def result(self) -> Attempt | None:
        """The attempt that counts: it completed, diverged or was pruned."""
        ended = (a for a in self.attempts if a.trial.state in STATES.values())
        return next(ended, None)

    @property
    def failure(self) -> Attempt | None:
        """The attempt that failed, where that is how the trial ended."""
        if self.result is not None or self.live:
            return None
        held = [a for a in self.attempts if a.trial.number >= self.forgiven]
        again = [a for a in held if a.outcome == ERROR or (a.outcome == MEMORY and a.alone)]
        # A process may be killed for reasons of its own, but hardly twice.
        again += [a for a in held if a.outcome == DIED][1:]
        return again[-1] if again else None

    @property
    def live(self) -> tuple[Attempt, ...]:
        return tuple(a for a in self.attempts if a.running)

    @property
    def owner(self) -> Attempt | None:
        """The attempt that counts among those that are running or have a result."""
        count = (a for a in self.attempts if a.running or a.trial.state in STATES.values())
        return min(count, key=lambda a: a.trial.number, default=None)

    @property
    def ended(self) -> bool:
        return self.result is not None or self.failure is not None

    @property
    def needs_to_be_alone(self) -> bool:
        return any(a.outcome in (MEMORY, DIED) for a in self.attempts)

    @property
    def value(self) -> float | None:
        """The measure, where the trial has completed."""
        done = self.result
        if done is None or done.trial.state != TrialState.COMPLETE:
            return None
        return done.trial.value


def attempts(label: str, trials: Iterable[FrozenTrial]) -> list[Attempt]:
    """The attempts of an entry, from the trials of its study."""
    found, names = [], [each.name for each in fields(Attempt)[2:]]
    for trial in trials:
        noted = trial.user_attrs
        if {"stage", "number"} <= noted.keys():
            slot = Slot(label, noted["stage"], noted["number"])
            found.append(Attempt(trial, slot, **{n: noted[n] for n in names if n in noted}))
    return found


def best(statuses: Sequence[Status], stage: int | None = None) -> Status | None:
    """The completed trial with the lowest measure; the first of those that are equal."""
    mine = [s for s in statuses if s.value is not None and stage in (None, s.slot.stage)]
    return min(mine, key=lambda s: (s.value, s.slot.stage, s.slot.number), default=None)
