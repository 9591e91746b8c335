"""The records against the bars that the library sets itself for a first try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rootfree_lab.bench.first_try.entrants import DIAGONAL, FULL_MATRIX, MATRIX
from rootfree_lab.bench.first_try.suite import is_convex
from rootfree_lab.bench.first_try.table import REFERENCE, Cells, labels_of, ratio, tasks_of

LATE = 3.0  # the last losses may be so many times the lowest


@dataclass(frozen=True)
class Bar:
    """One bar for one optimizer."""

    letter: str
    label: str
    demand: str
    met: bool | None  # None: not measured
    tasks: int  # measured
    found: str  # the figures that decide

    @property
    def verdict(self) -> str:
        return {True: "met", False: "missed", None: "not measured"}[self.met]


def bars(cells: Cells, constant: Cells) -> list[Bar]:
    """Every bar, also for what `--set` changed; `constant` are the runs at a constant rate."""
    found = []
    for label in _tried(cells, "IFWhitening"):
        found.append(_against_adamw(cells, "a", label, most=1.0, share=1.0, below=0.9))
    for label in [*_tried(cells, "IFShampoo"), *_tried(cells, "RFShampoo")]:
        found.append(_against_adamw(cells, "b", label, most=1.05, share=1.0))
    for label in [*_tried(cells, "RFRMSprop"), *_tried(cells, "RFAdamW")]:
        found.append(_against_adamw(cells, "c", label, most=1.2, share=0.8))
    for name in FULL_MATRIX:
        found += [_against_sgd(cells, label) for label in _tried(cells, name)]
    ours = (*DIAGONAL, *MATRIX, *FULL_MATRIX)
    late = [label for label in labels_of(constant) if label.split(" ")[0] in ours]
    return found + [_late(constant, label) for label in late]


def _tried(cells: Cells, name: str) -> list[str]:
    """The optimizer with each of its settings; its bare name where it was not run."""
    return [label for label in labels_of(cells) if label.split(" ")[0] == name] or [name]


def as_markdown(found: Sequence[Bar]) -> str:
    """A list, one line a bar that was measured."""
    lines = [
        f"- ({bar.letter}) `{bar.label}`, {bar.demand}: **{bar.verdict}** on {bar.tasks} "
        f"task{'s' if bar.tasks > 1 else ''}; {bar.found}"
        for bar in found
        if bar.tasks
    ]
    return "\n".join(lines) + "\n"


def _against_adamw(
    cells: Cells, letter: str, label: str, *, most: float, share: float, below: float | None = None
) -> Bar:
    """At most so many times AdamW's loss on a share of the tasks, and well below it on half."""
    ratios = _ratios(cells, label, REFERENCE, tasks_of(cells))
    over = {task: value for task, value in ratios.items() if value > most}
    met = len(over) <= (1 - share) * len(ratios) + 1e-9
    where = "on every task, none diverged" if share == 1 else f"on {share:.0%} of the tasks"
    demand = f"at most {most:g} x {REFERENCE} {where}"
    text = f"above: {_listed(over)}" if over else "none above"
    if below is not None:
        count = sum(value < below for value in ratios.values())
        met = met and 2 * count >= len(ratios)
        demand += f", below {below:g} x on at least half"
        text += f"; below {below:g} x on {count}"
    return Bar(letter, label, demand, met if ratios else None, len(ratios), text)


def _listed(ratios: Mapping[str, float]) -> str:
    return ", ".join(
        f"{task} {'diverged' if math.isinf(value) else f'{value:.2f}'}"
        for task, value in ratios.items()
    )


def _against_sgd(cells: Cells, label: str) -> Bar:
    convex = [task for task in tasks_of(cells) if is_convex(task)]
    ratios = _ratios(cells, label, "SGD", convex)
    met = all(value <= 1 for value in ratios.values()) if ratios else None
    text = f"times SGD's: {_listed(ratios)}"
    return Bar("d", label, "at most SGD's loss on convex tasks", met, len(ratios), text)


def _late(constant: Cells, label: str) -> Bar:
    ratios = {
        task: math.inf if constant[label, task].diverged else constant[label, task].late_ratio
        for task in tasks_of(constant)
        if (label, task) in constant
    }
    over = {task: value for task, value in ratios.items() if value > LATE}
    text = f"above: {_listed(over)}" if over else f"largest {max(ratios.values()):.2f}"
    return Bar("e", label, f"no late spike above {LATE:g} x", not over, len(ratios), text)


def _ratios(cells: Cells, label: str, to: str, tasks: Sequence[str]) -> dict[str, float]:
    values = {task: ratio(cells, label, task, to) for task in tasks}
    return {task: value for task, value in values.items() if value is not None}
