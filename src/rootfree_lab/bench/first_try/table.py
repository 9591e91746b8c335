"""Records as a table: rows are optimizers, columns tasks, cells final losses beside AdamW's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from rootfree_lab.bench.first_try.entrants import MATRIX, NAMES
from rootfree_lab.bench.first_try.records import Record
from rootfree_lab.bench.first_try.suite import ALL
from rootfree_lab.bench.markdown import rows
from rootfree_lab.bench.table import NOTHING

REFERENCE = "AdamW"


@dataclass(frozen=True)
class Cell:
    """An optimizer on a task, over its seeds."""

    losses: tuple[float, ...]  # final ones of the runs that did not diverge
    diverged: int
    late_ratio: float  # the largest

    @property
    def runs(self) -> int:
        return len(self.losses) + self.diverged

    @property
    def mean(self) -> float:
        """Infinite as soon as one seed diverged."""
        if self.diverged or not self.losses:
            return math.inf
        return sum(self.losses) / len(self.losses)

    @property
    def half_range(self) -> float:
        return (max(self.losses) - min(self.losses)) / 2 if self.losses else math.nan


Cells = dict[tuple[str, str], Cell]  # (label, task)


def cells(records: Iterable[Record]) -> Cells:
    """All seeds together; of two records of one seed the later one counts."""
    latest = {(r.label, r.task, r.seed): r for r in records}
    found: dict[tuple[str, str], list[Record]] = {}
    for (label, task, _), record in latest.items():
        found.setdefault((label, task), []).append(record)
    return {key: _cell(group) for key, group in found.items()}


def ratio(cells: Cells, label: str, task: str, to: str = REFERENCE) -> float | None:
    """Mean final loss to that of another optimizer; None where one of them was not run."""
    mine, other = cells.get((label, task)), cells.get((to, task))
    if mine is None or other is None:
        return None
    if math.isinf(mine.mean):
        return math.inf
    return mine.mean / other.mean if other.mean > 0 else math.inf


def tasks_of(cells: Cells) -> list[str]:
    """In the order of the suite."""
    there = {task for _, task in cells}
    return [task for task in ALL if task in there]


def labels_of(cells: Cells) -> list[str]:
    """In the order of the line-up; what `--set` changed follows its optimizer."""
    labels = dict.fromkeys(label for label, _ in cells)
    return sorted(labels, key=lambda label: (NAMES.index(label.split(" ")[0]), label))


def as_markdown(cells: Cells) -> str:
    """The tables of the documentation: a row a task, a column an optimizer; ratios alone.

    The matrix methods come first: a narrow page shows the first columns. Optimizers that ran on
    some of the tasks have a table of their own.
    """
    tasks, labels = tasks_of(cells), [label for label in labels_of(cells) if label != REFERENCE]
    labels.sort(key=lambda label: label.split(" ")[0] not in MATRIX)
    everywhere = [label for label in labels if all((label, task) in cells for task in tasks)]
    tables = []
    for shown in (everywhere, [label for label in labels if label not in everywhere]):
        mine = [task for task in tasks if any((label, task) in cells for label in shown)]
        head = ("task", f"{REFERENCE}: loss", *shown)
        body = [
            [task, text(cells, REFERENCE, task), *(short(cells, label, task) for label in shown)]
            for task in mine
        ]
        tables += ["\n".join(rows(head, body))] if shown else []
    return "\n\n".join(tables) + "\n"


def as_table(cells: Cells, title: str) -> Table:
    """For a terminal: a column a task would not fit, so a row is an optimizer on a task."""
    labels, tasks = labels_of(cells), tasks_of(cells)
    table = Table(title=title)
    table.add_column("task", no_wrap=True)
    table.add_column("optimizer", overflow="fold")
    for heading in (f"x {REFERENCE}", "final loss", "last / lowest", "diverged"):
        table.add_column(heading, justify="right", no_wrap=True)
    for task in tasks:
        for label in labels:
            cell = cells.get((label, task))
            if cell is not None:
                table.add_row(task, label, *_numbers(cells, label, task, cell))
        table.add_section()
    return table


def text(cells: Cells, label: str, task: str) -> str:
    """`0.0123 ± 0.001`: the loss with half the range of its seeds."""
    cell = cells.get((label, task))
    if cell is None:
        return NOTHING
    return f"diverged {cell.diverged}/{cell.runs}" if cell.diverged else _loss(cell)


def short(cells: Cells, label: str, task: str) -> str:
    """The ratio, or the loss where there is nothing to compare it with."""
    against = ratio(cells, label, task)
    known = (label, task) in cells and not cells[label, task].diverged
    return _times(against) if known and against is not None else text(cells, label, task)


def remarks(records: Sequence[Record]) -> str:
    """One sentence on what the table is of."""
    seeds = len({r.seed for r in records})
    seconds = sum(r.seconds for r in records)
    return (
        f"Final training loss divided by that of {REFERENCE}, means over {seeds} "
        f"seed{'s' if seeds != 1 else ''}; ± is half of their range. {len(records)} runs, "
        f"{seconds / 60:.0f} minutes of training."
    )


def _cell(records: Sequence[Record]) -> Cell:
    sound = [r for r in records if not r.diverged and r.final_loss is not None]
    late = [math.inf if r.late_ratio is None else r.late_ratio for r in records]
    return Cell(
        tuple(r.final_loss for r in sound if r.final_loss is not None),
        len(records) - len(sound),
        max(late),
    )


def _numbers(cells: Cells, label: str, task: str, cell: Cell) -> tuple[str, ...]:
    against = ratio(cells, label, task)
    return (
        NOTHING if against is None or math.isinf(against) else _times(against),
        NOTHING if cell.diverged else _loss(cell),
        NOTHING if cell.diverged else f"{cell.late_ratio:.2f}",
        f"{cell.diverged}/{cell.runs}" if cell.diverged else "",
    )


def _loss(cell: Cell) -> str:
    return f"{cell.mean:.3g} ± {cell.half_range:.1g}"


def _times(ratio: float) -> str:
    """Two digits after the point, or two that are not zero."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}"
