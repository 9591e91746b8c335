"""The ledger of a search: who carries out which trial, safely for many processes and machines.

Each entry has a study of Optuna, each attempt at a trial is a trial of that study. To claim a trial
a process adds an attempt that is running, and looks: the attempt with the lowest number is the one
that counts, any other is withdrawn. Storages number trials in one order for all, so exactly one
process goes on. A process that dies leaves a running attempt. Whoever notices closes it, which a
storage lets happen once, and the trial can be claimed again. A finished one never can.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import Study, StudyDirection
from optuna.trial import TrialState, create_trial

from rootfree_lab.files.appending import finite
from rootfree_lab.files.checkpoints import differences
from rootfree_lab.files.records import Record
from rootfree_lab.search import liveness, outcomes
from rootfree_lab.search.attempts import STATES, Attempt, Status, attempts, best
from rootfree_lab.search.settings import Claim, Entry, Slot
from rootfree_lab.search.spaces import Choice, Space, as_table, parse
from rootfree_lab.search.storage import StorageError

# Seconds without a sign of life after which a process counts as dead, wherever it is.
STALE = 180.0


class Ledger:
    """The trials of a search in a storage."""

    def __init__(
        self, storage: BaseStorage, name: str, entries: list[Entry], *, retry_failed: bool = False
    ) -> None:
        self._storage = storage
        self.entries = {entry.label: entry for entry in entries}
        self._token = liveness.token()
        self._seen: dict[int, tuple[Any, float]] = {}
        self.claims: dict[int, Claim] = {}
        self._studies = {
            entry.label: self._study(f"{name}/{entry.label}", entry) for entry in entries
        }
        self._forgiven = {
            label: len(study.trials) if retry_failed else 0
            for label, study in self._studies.items()
        }

    def _study(self, name: str, entry: Entry) -> Study:
        """The entry's study, made where there is none; one of another search is refused."""
        kept = 100 * (1 - entry.search.prune_worst)
        study = optuna.create_study(
            storage=self._storage, study_name=name, load_if_exists=True, direction="minimize",
            sampler=optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.PercentilePruner(kept, n_startup_trials=4),
        )  # fmt: skip
        if study.direction != StudyDirection.MINIMIZE:
            raise StorageError(f"the study {name!r} of the storage is not of this laboratory")
        if "search" not in study.user_attrs:
            if study.trials:
                raise StorageError(f"the study {name!r} of the storage is not of this laboratory")
            study.set_user_attr("search", entry.identity())
        known = {"draws": "independent", **study.user_attrs["search"]}  # once there was no other
        if known != entry.identity():
            where = ", ".join(differences(known, entry.identity()))
            raise StorageError(
                f"the storage has another search of {name!r} (it differs in {where}): choose "
                "another --storage or --name"
            )
        return study

    # -- looking ---------------------------------------------------------------------------

    def statuses(self, label: str) -> list[Status]:
        """Where the trials of an entry stand."""
        found: dict[Slot, list[Attempt]] = {slot: [] for slot in self.entries[label].slots}
        planned = len(found)
        for attempt in attempts(label, self._studies[label].get_trials(deepcopy=False)):
            found.setdefault(attempt.slot, []).append(attempt)
        statuses = [Status(slot, tuple(a), self._forgiven[label]) for slot, a in found.items()]
        # Fewer narrowed trials than once: those that have a result still count.
        return statuses[:planned] + [s for s in statuses[planned:] if s.result is not None]

    def space(self, label: str, stage: int, statuses: list[Status]) -> Space | None:
        """The space of a stage; None while the stage before it goes on."""
        entry = self.entries[label]
        if stage == 1:
            return entry.space
        study = self._studies[label]
        if "narrowed" not in study.user_attrs:
            if not all(status.ended for status in statuses if status.slot.stage == 1):
                return None
            # Kept once for all: a failed trial that is repeated later does not move it.
            study.set_user_attr("narrowed", as_table(_narrowed(entry, statuses)))
        table = study.user_attrs["narrowed"]
        return {name: parse(f"narrowed.{name}", given) for name, given in table.items()}

    def finished(self) -> bool:
        return all(s.ended for label in self.entries for s in self.statuses(label))

    # -- claiming --------------------------------------------------------------------------

    def claim(self, *, alone: bool, crowded_out: bool = False) -> Claim | None:
        """A trial that is this process's to carry out; None where there is none at the moment.

        `alone`: no other trial will run beside it here. With `crowded_out` only trials that had no
        room beside others are claimed, otherwise those are left for later, unless all are alone.
        """
        waiting: list[tuple[Status, list[Status]]] = []
        for label in self.entries:
            self._close_dead(label)
            statuses = self.statuses(label)
            waiting += [(s, statuses) for s in statuses if not s.ended and not s.live]
        # All optimizers go on at one pace.
        waiting.sort(key=lambda pair: (pair[0].slot.stage, pair[0].slot.number))
        for status, statuses in waiting:
            if (crowded_out or not alone) and status.needs_to_be_alone != crowded_out:
                continue
            space = self.space(status.slot.label, status.slot.stage, statuses)
            if space is not None and (claim := self._claim(status.slot, space, alone)) is not None:
                return claim
        return None

    def _claim(self, slot: Slot, space: Space, alone: bool) -> Claim | None:
        entry, study = self.entries[slot.label], self._studies[slot.label]
        settings = entry.settings(slot, space)
        template = create_trial(
            state=TrialState.RUNNING, params=dict(settings),
            distributions=_distributions(space, entry.space),
            user_attrs={
                "stage": slot.stage, "number": slot.number, "worker": self._token, "alone": alone,
            },
        )  # fmt: skip
        mine = self._storage.create_new_trial(study._study_id, template)
        claim = Claim(slot, mine, entry.trial(slot, settings), alone)
        owner = next(s.owner for s in self.statuses(slot.label) if s.slot == slot)
        if owner is None or owner.id != mine:
            self.fail(claim, outcomes.WITHDRAWN, "another process was first")
            return None
        self.claims[mine] = claim
        return claim

    def _close_dead(self, label: str) -> None:
        """Close the running attempts whose process has died."""
        for status in self.statuses(label):
            for attempt in status.live:
                if attempt.id in self.claims or not self._is_dead(attempt):
                    continue
                if attempt.record is not None:  # it had come to its end, and died before saying so
                    self.conclude(attempt, attempt.record)
                else:
                    self.fail(attempt, outcomes.ABANDONED, "its process is gone")

    def _is_dead(self, attempt: Attempt) -> bool:
        if attempt.worker == self._token:  # this process's, which knows nothing of it
            return True
        if liveness.is_alive(attempt.worker) is False:
            return True
        # Of another machine; or another process has its number since the machine began anew.
        now = time.monotonic()
        sign = attempt.beat, len(attempt.trial.intermediate_values)
        seen, since = self._seen.get(attempt.id, (None, now))
        if seen != sign:
            self._seen[attempt.id] = (sign, now)
            return False
        return now - since > STALE

    # -- carrying out ----------------------------------------------------------------------

    def beat(self) -> None:
        """Tell others that the trials of this process are alive."""
        for trial in list(self.claims):
            with suppress(UpdateFinishedTrialError):
                self._storage.set_trial_user_attr(trial, "beat", time.time())

    def report(self, claim: Claim, step: int, total: int, point: Mapping[str, Any]) -> str:
        """Note a point of the curve; "go on", "prune" or "lost" (it was taken for dead)."""
        value = measured(point, self.entries[claim.slot.label].search.measure)
        try:
            if value is not None:
                self._storage.set_trial_intermediate_value(claim.id, step, value)
        except UpdateFinishedTrialError:
            return "lost"
        entry, study = self.entries[claim.slot.label], self._studies[claim.slot.label]
        late = entry.search.prune_after * total <= step < total
        if late and value is not None and entry.search.prune_worst > 0:
            trial = self._storage.get_trial(claim.id)
            return "prune" if study.pruner.prune(study, trial) else "go on"
        return "go on"

    def conclude(self, which: Claim | Attempt, record: Record) -> bool:
        """Keep the record of a trial that has come to its end; False: it was taken for dead."""
        value = measured(record["final"], self.entries[which.slot.label].search.measure)
        kind = (record.get("failure") or {}).get("kind", outcomes.COMPLETED)
        outcome = kind if value is not None else outcomes.DIVERGED
        try:
            # The record first: who finds the trial after a kill at this line can still close it.
            self._storage.set_trial_user_attr(which.id, "record", finite(record))
            self._storage.set_trial_user_attr(which.id, "outcome", outcome)
            completed = outcome == outcomes.COMPLETED
            values = [value] if completed and value is not None else None
            self._storage.set_trial_state_values(which.id, STATES[outcome], values)
            kept = True
        except UpdateFinishedTrialError:  # by somebody else; or here, and the answer was lost
            kept = self._storage.get_trial(which.id).state == STATES[outcome]
        self.claims.pop(which.id, None)
        return kept

    def fail(self, which: Claim | Attempt, outcome: str, message: str) -> None:
        with suppress(UpdateFinishedTrialError):  # somebody else was quicker
            self._storage.set_trial_user_attr(which.id, "outcome", outcome)
            self._storage.set_trial_user_attr(which.id, "message", message)
            self._storage.set_trial_state_values(which.id, TrialState.FAIL)
        self.claims.pop(which.id, None)


def measured(figures: Mapping[str, Any], measure: str) -> float | None:
    """The measure, from a point of a curve or the final figures; None where it is no number."""
    error, loss = figures.get("test_error"), figures.get("test_loss")
    found = (loss if error is None else error) if measure == "auto" else figures.get(measure)
    return None if found is None or not math.isfinite(found) else float(found)


def _narrowed(entry: Entry, statuses: list[Status]) -> Space:
    """Around the best of the wide stage; the wide space again where none came to its end."""
    found = best(statuses, stage=1)
    if found is None or found.result is None:
        return entry.space
    best_settings, share = found.result.settings, entry.search.narrow
    return {
        name: allowed.narrowed(best_settings[name], share)  # type: ignore[arg-type]
        for name, allowed in entry.space.items()
    }


def _distributions(space: Space, wide: Space) -> dict[str, BaseDistribution]:
    # A study has one set of choices for all its trials.
    return {
        name: CategoricalDistribution(wide[name].ends())
        if isinstance(allowed, Choice)
        else FloatDistribution(allowed.low, allowed.high, log=allowed.scale == "log")
        for name, allowed in space.items()
    }
