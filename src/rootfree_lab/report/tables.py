"""Results of an experiment as columns: mean and spread over seeds, and which one is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rootfree_lab.report.bars import milliseconds
from rootfree_lab.report.experiments import Experiment
from rootfree_lab.report.milestones import REFERENCE, milestone, reference
from rootfree_lab.report.records import Run
from rootfree_lab.report.statistics import Summary, summary

DASH = "–"
_METRICS = {"Test error": "test_error", "Test loss": "test_loss", "Training loss": "train_loss"}


@dataclass(frozen=True)
class Cell:
    """A value as it is printed: mean, deviation (empty for one seed), and whether it is best."""

    mean: str
    deviation: str
    best: bool
    note: str  # where not all finished runs have a value


@dataclass(frozen=True)
class Column:
    """One quantity of one experiment: a cell for each group that has it."""

    title: str
    cells: Mapping[str, Cell]  # by the group's label
    in_paper: bool


def columns(experiment: Experiment) -> list[Column]:
    """The quantities that some finished run of the experiment has, smaller being better in all."""

    def of(table: str, key: str) -> Callable[[Run], float]:
        return lambda run: getattr(run, table).get(key, math.nan)

    wanted: list[tuple[str, Callable[[Run], float], str]] = [
        ("Test error", of("final", "test_error"), "fraction"),
        ("Test loss", of("final", "test_loss"), ""),
        ("Training loss", of("final", "train_loss"), ""),
        ("Time", of("seconds", "total"), "time"),
        ("Optimizer step, ms", lambda run: milliseconds(run, "optimizer"), ""),
        ("Peak memory", of("memory", "peak_bytes"), "bytes"),
        ("Optimizer state", of("memory", "state_bytes"), "bytes"),
    ]
    adamw = reference(experiment)
    if adamw is not None and len(experiment.groups) > 1:
        wanted += [
            (f"Steps to {REFERENCE}’s loss", milestone(adamw, "step"), ""),
            (f"Time to {REFERENCE}’s loss", milestone(adamw, "seconds"), "time"),
        ]
    found = (_column(experiment, *each) for each in wanted)
    return [column for column in found if column is not None]


def winner(known: Mapping[str, Summary], eligible: Iterable[str]) -> str | None:
    """The label that is lower than every other by more than their deviations together, or None.

    One seed has no deviation, so nothing can be said of it.
    """
    ordered = sorted(eligible, key=lambda label: known[label].mean)
    if len(ordered) < 2:
        return None
    first, *rest = (known[label] for label in ordered)
    clear = all(first.mean + first.deviation < other.mean - other.deviation for other in rest)
    return ordered[0] if clear else None


def _eligible(experiment: Experiment, known: Mapping[str, Summary]) -> set[str]:
    """The groups that may be best: those with the fewest failures, as survivors flatter a mean."""
    failed = {
        group.label: len(group.runs) - known[group.label].count
        for group in experiment.groups
        if group.label in known
    }
    return {label for label, count in failed.items() if count == min(failed.values())}


def _column(
    experiment: Experiment, title: str, value: Callable[[Run], float], kind: str
) -> Column | None:
    """One quantity; None where no finished run has it."""
    summaries = {g.label: summary(map(value, g.finished)) for g in experiment.groups}
    known = {label: entry for label, entry in summaries.items() if entry.count}
    if not known:
        return None
    # On a CPU the peak is that of the whole process: more about Python than a method.
    judged = title != "Peak memory" or not experiment.on_cpu
    best = winner(known, _eligible(experiment, known)) if judged else None
    finished = {g.label: len(g.finished) for g in experiment.groups}
    means = [entry.mean for entry in known.values()]
    factor, unit = _unit(kind, max(means))
    form = _fixed(2) if kind == "fraction" else _form([mean * factor for mean in means])

    def text(value: float) -> str:
        return form(value * factor) if math.isfinite(value) else ""

    cells = {
        label: Cell(
            mean=text(entry.mean),
            # Memory that is the same in every run needs no ± 0.00.
            deviation=text(entry.deviation) if kind != "bytes" or entry.deviation else "",
            best=label == best,
            note="" if entry.count == finished[label] else f"{entry.count} of {finished[label]}",
        )
        for label, entry in known.items()
    }
    in_paper = title in ("Time", "Peak memory") or _METRICS.get(title) == experiment.headline
    return Column(f"{title}, {unit}" if unit else title, cells, in_paper)


def _unit(kind: str, largest: float) -> tuple[float, str]:
    if kind == "fraction":
        return 100.0, "%"
    if kind == "time":
        units = [(3600.0, "h"), (60.0, "min"), (1.0, "s")]
        return next(((1 / size, name) for size, name in units if largest >= 2 * size), (1.0, "s"))
    if kind == "bytes":
        powers = [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")]
        return next(((1 / size, name) for size, name in powers if largest >= size), (1.0, "B"))
    return 1.0, ""


def _form(means: Sequence[float]) -> Callable[[float], str]:
    """As many decimals for all as show three digits of the smallest mean.

    Where that would be more than six, three digits of each number, small ones with an exponent.
    """
    smallest = min((abs(mean) for mean in means if mean), default=1.0)
    decimals = max(0, 2 - math.floor(math.log10(smallest)))
    return _fixed(decimals) if decimals <= 6 else _three_digits


def _fixed(decimals: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{decimals}f}"


def _three_digits(value: float) -> str:
    if abs(value) >= 1e-3 or value == 0:
        return f"{value:#.3g}".rstrip(".")
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """All labels of all experiments, each once, in the order in which they come."""
    return list(dict.fromkeys(group.label for e in experiments for group in e.groups))
