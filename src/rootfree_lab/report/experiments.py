"""Which runs belong together: an experiment is data and model, a group its runs of one method."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rootfree_lab.report.records import METRICS, Run
from rootfree_lab.report.statistics import median

# The parts of a config that decide what is computed, and the fields in them that do not.
SECTIONS = ("data", "model", "optimizer", "schedule", "train")
IRRELEVANT = {"train.seed", "train.eval_every", "data.folder"}


@dataclass(frozen=True)
class Group:
    """The runs of one method with one setting, a run per seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> list[Run]:
        """The runs that statistics are made of."""
        return [run for run in self.runs if run.status == "completed"]

    @property
    def failed(self) -> int:
        return len(self.runs) - len(self.finished)

    @property
    def seeds(self) -> str:
        """How many finished, of how many where some did not."""
        done, all_of = len(self.finished), len(self.runs)
        return str(done) if done == all_of else f"{done} of {all_of}"


@dataclass(frozen=True)
class Experiment:
    """All groups on one data set with one model."""

    data: str
    model: str
    groups: tuple[Group, ...]
    differences: tuple[str, ...]  # settings outside the optimizer that are not the same in all runs

    @property
    def name(self) -> str:
        return f"{self.model} on {self.data}"

    @property
    def on_cpu(self) -> bool:
        return any(
            str(run.versions.get("device", "")).lower().startswith("cpu")
            for group in self.groups
            for run in group.runs
        )

    @property
    def headline(self) -> str:
        """The metric that decides: the test error, or the test loss where there is no error."""
        for metric in ("test_error", "test_loss", "train_loss"):
            if any(math.isfinite(run.final[metric]) for group in self.groups for run in group.runs):
                return metric
        return METRICS[0]

    def rank(self, group: Group) -> float:
        """The median of the metric that decides; infinite where no run finished with one."""
        value = median(run.final[self.headline] for run in group.finished)
        return value if math.isfinite(value) else math.inf


def arrange(runs: Sequence[Run]) -> tuple[list[Experiment], set[str]]:
    """Experiments in the order of the records, and the sources of runs that a later one repeats.

    A run that its file repeats under another label was renamed, and counts under the last one.
    Runs with the same label but different settings are not seeds of one another: they become groups
    of their own, and their labels say in which settings they differ.
    """
    by_experiment: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_experiment.setdefault((run.data, run.model), []).append(run)
    experiments = []
    repeated: set[str] = set()
    for (data, model), members in by_experiment.items():
        renamed = _renamed(members)
        repeated |= renamed
        by_label: dict[str, list[Run]] = {}
        for run in (run for run in members if run.source not in renamed):
            by_label.setdefault(run.label, []).append(run)
        groups: list[Group] = []
        for label, same in by_label.items():
            for full_label, group in _by_settings(label, same):
                kept = _latest(group)
                repeated |= {run.source for run in group} - {run.source for run in kept}
                groups.append(Group(full_label, tuple(kept)))
        experiments.append(Experiment(data, model, tuple(groups), _differences(groups)))
    return experiments, repeated


def settings(run: Run) -> dict[str, str]:
    """What decides the outcome of a run apart from its seed: dotted names and values as JSON."""
    flat: dict[str, str] = {}
    for section in SECTIONS:
        _flatten(section, run.config.get(section), flat)
    return {key: value for key, value in flat.items() if key not in IRRELEVANT}


def _flatten(prefix: str, value: Any, flat: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            _flatten(f"{prefix}.{key}", entry, flat)
    elif value is not None:
        flat[prefix] = _value(value)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _varying(tables: Iterable[dict[str, str]]) -> list[str]:
    tables = list(tables)
    names = {name: None for table in tables for name in table}  # a set that keeps its order
    return [name for name in names if len({table.get(name) for table in tables}) > 1]


def _by_settings(label: str, runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    tables = [settings(run) for run in runs]
    varying = _varying(tables)
    if not varying:
        return [(label, list(runs))]
    last = [name.rsplit(".", 1)[-1] for name in varying]
    shown = [
        short if last.count(short) == 1 else name for short, name in zip(last, varying, strict=True)
    ]
    parts: dict[str, list[Run]] = {}
    for run, table in zip(runs, tables, strict=True):
        values = [
            f"{short}={table[name]}"
            for short, name in zip(shown, varying, strict=True)
            if name in table
        ]
        parts.setdefault(f"{label} ({', '.join(values) or 'defaults'})", []).append(run)
    return list(parts.items())


def _renamed(runs: Sequence[Run]) -> set[str]:
    """Sources of runs that their file has again, under another label."""
    latest: dict[tuple[Any, ...], Run] = {}
    found = set()
    for run in (run for run in runs if run.seed):
        file, _, _ = run.source.rpartition(", line ")
        key = (file, run.seed, *sorted(settings(run).items()))
        if key in latest and latest[key].label != run.label:
            found.add(latest[key].source)
        latest[key] = run
    return found


def _latest(runs: Sequence[Run]) -> list[Run]:
    """One run a seed: a second run of a seed replaces the first, unless only the first finished."""
    latest: dict[str, Run] = {}
    for run in runs:
        key = run.seed or run.source  # without a seed there is no telling that it is a repetition
        if key not in latest or run.completed or not latest[key].completed:
            latest[key] = run
    return list(latest.values())


def _differences(groups: Sequence[Group]) -> tuple[str, ...]:
    runs = [run for group in groups for run in group.runs]
    varying = _varying(settings(run) for run in runs)
    # A run that never started does not know its device.
    started = [run for run in runs if run.steps > 0]
    versions = _varying({k: _value(v) for k, v in run.versions.items()} for run in started)
    return tuple(
        [name for name in varying if not name.startswith("optimizer.")]
        + [name if name == "device" else f"version of {name}" for name in versions]
    )
