"""What was run: the records under results/, by the case of an experiment that they belong to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import as_file, files
from pathlib import Path

from rootfree_lab.config.reading import read_toml
from rootfree_lab.report.bars import milliseconds
from rootfree_lab.report.experiments import Experiment, Group, arrange, settings
from rootfree_lab.report.milestones import milestone, reference
from rootfree_lab.report.records import ReportError, Run, read
from rootfree_lab.report.statistics import Summary, summary

FINAL, RECORDS, NOTE = Path("final", "records.jsonl"), "records.jsonl", "note.md"
FP32, BF16 = "_fp32", "_bf16"  # end the folder of final runs repeated in the other precision


@dataclass(frozen=True)
class Case:
    """One config of an experiment, with what the paper reports of it."""

    config: str
    kind: str
    title: str
    measure: str | None = None  # that decides; None: the test error, or the loss without one
    error: Mapping[str, float] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Topic:
    """One experiment of the paper, or beyond it."""

    letter: str
    title: str
    paper: str
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Outcome:
    """The final runs of a case, and how many trials each optimizer had."""

    case: Case
    experiment: Experiment
    trials: Mapping[str, int]
    repeated: Experiment | None  # the same in the other precision

    @property
    def measure(self) -> str:
        return self.case.measure or self.experiment.headline

    @property
    def unit(self) -> str:
        return " %" if self.measure == "test_error" else ""

    def value(self, label: str) -> Summary | None:
        """The measure of an optimizer over its seeds, an error in percent."""
        return self.of(label, final(self.measure))

    def of(self, label: str, quantity: Callable[[Run], float]) -> Summary | None:
        """Any quantity of an optimizer's runs, None where no run has it."""
        return over_seeds(self.experiment, label, quantity)

    def seconds_to_reference(self, label: str) -> Summary | None:
        """Seconds to AdamW's final training loss, None where a finished run does not get there."""
        adamw = reference(self.experiment)
        if adamw is None:
            return None
        found = self.of(label, milestone(adamw, "seconds"))
        seeds = {group.label: len(group.finished) for group in self.experiment.groups}
        return found if found is not None and found.count == seeds[label] else None

    @property
    def labels(self) -> list[str]:
        return [group.label for group in self.experiment.groups]


def final(measure: str) -> Callable[[Run], float]:
    """The final value of a run, an error in percent."""
    factor = 100 if measure == "test_error" else 1
    return lambda run: factor * run.final[measure]


def step_milliseconds(run: Run) -> float:
    """What the optimizer takes of a step."""
    return milliseconds(run, "optimizer")


def peak(run: Run) -> float:
    """Peak memory in bytes."""
    return run.memory.get("peak_bytes", math.nan)


def in_bf16(experiment: Experiment) -> bool:
    """Whether runs had bf16 autocast."""
    runs = [run for group in experiment.groups for run in group.runs]
    return any(settings(run).get("train.autocast") == "bf16" for run in runs)


def state(run: Run) -> float:
    """What the optimizer keeps, in bytes."""
    return run.memory.get("state_bytes", math.nan)


def over_seeds(
    experiment: Experiment, label: str, quantity: Callable[[Run], float]
) -> Summary | None:
    """A quantity over the finished runs of an optimizer, None where no run has it."""
    runs = [run for group in experiment.groups if group.label == label for run in group.finished]
    found = summary(map(quantity, runs))
    return found if found.count else None


def topics() -> list[Topic]:
    """The experiments of the page, from experiments.toml."""
    with as_file(files("rootfree_lab.evidence") / "experiments.toml") as path:
        entries = read_toml(path)["experiment"]
    return [
        Topic(
            entry["letter"],
            entry["title"],
            " ".join(entry["paper"].split()),
            tuple(Case(**case) for case in entry.get("case", [])),
        )
        for entry in entries
    ]


def outcome(results: Path, case: Case) -> Outcome | None:
    """What the folder of a case has; None where there are no final runs."""
    experiment = _final_runs(results / case.config)
    if experiment is None:
        return None
    other = _final_runs(results / f"{case.config}{FP32 if in_bf16(experiment) else BF16}")
    return Outcome(case, experiment, trials(results / case.config), other)


def others(results: Path, known: Sequence[Case]) -> list[Case]:
    """Folders with records that belong to no case, as cases without a claim."""
    names = {case.config for case in known}
    return [
        Case(folder.name, "unknown", folder.name)
        for folder in sorted(results.iterdir())
        if folder.name.removesuffix(FP32).removesuffix(BF16) not in names
        and any((folder / file).is_file() for file in (FINAL, RECORDS))
    ]


def search_runs(folder: Path) -> list[Run]:
    """One run a trial of the search, labelled with its optimizer; none where nothing was searched.

    A label of a trial is that of the entry and a number, as in `AdamW 2.1`.
    """
    if not (folder / RECORDS).is_file():
        return []
    return [replace(run, label=run.label.rpartition(" ")[0]) for run in _read(folder / RECORDS)]


def trials(folder: Path) -> dict[str, int]:
    """How many trials each optimizer had; those that were pruned or diverged count."""
    return dict(Counter(run.label for run in search_runs(folder)))


def _final_runs(folder: Path) -> Experiment | None:
    if not (folder / FINAL).is_file():
        return None
    runs = _read(folder / FINAL)
    experiments, _ = arrange(runs)
    if len(experiments) != 1:
        names = ", ".join(experiment.name for experiment in experiments)
        raise ReportError(f"{folder / FINAL} has runs of several experiments: {names}")
    (experiment,) = experiments
    # Where a search went on, an optimizer has runs with former settings too: the last ones count.
    latest: dict[str, Group] = {}
    for group in experiment.groups:
        label = group.runs[0].label
        latest[label] = replace(group, label=label)
    return replace(experiment, groups=tuple(latest.values()))


def _read(file: Path) -> list[Run]:
    runs, problems = read(file)
    if problems:  # evidence is not made of half a file
        raise ReportError(f"{file}: {problems[0]}")
    return runs
