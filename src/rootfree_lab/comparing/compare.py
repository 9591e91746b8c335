"""Carries out every entry and seed of a config that has no record yet, and shows a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rootfree_lab.comparing.many_runs import carry_out, side_by_side
from rootfree_lab.config.own_code import shown
from rootfree_lab.config.settings import Config
from rootfree_lab.files import checkpoints
from rootfree_lab.files.checkpoints import checkpoint_path
from rootfree_lab.files.records import Record
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.report.bars import milliseconds
from rootfree_lab.report.records import as_run
from rootfree_lab.report.statistics import median
from rootfree_lab.training.checking import check
from rootfree_lab.training.run import known_record, make_output_folder, records_path, sweep
from rootfree_lab.training.watching.progress import Bar, Lines, Watcher, plain_lines

# A run's identity -> its record; runs not reached yet are missing.
Results = dict[str, Record]


def compare(
    runs: Sequence[Config],
    *,
    out: Path,
    console: Console,
    stop: StopSignals | None = None,
    jobs: int = 1,
) -> Results:
    """Carry out the runs that have no record yet; a failing run is recorded, and the rest go on.

    Interrupted runs continue from their checkpoints. Nothing is run if a checkpoint belongs to
    other settings, because somebody may still want it, or if data are missing or a name is unknown
    in one of the runs. `jobs` runs are carried out side by side, each in its own process.
    """
    make_output_folder(out)
    results = {r.identity(): done for r in runs if (done := known_record(out, r)) is not None}
    waiting = [run for run in runs if run.identity() not in results]
    for run in runs:
        if run.identity() in results:
            sweep(out, run)
    for run in waiting:
        check(run)
        path = checkpoint_path(out, run)
        if path.exists():
            checkpoints.load(path, run)
    if results:
        said = f"{len(results)} of {len(runs)} runs are in {records_path(out)} already"
        console.print(said, markup=False, soft_wrap=True)
    say = plain_lines(console)
    bar, latest = Bar(console), dict[str, Text]()  # by the run's identity
    live = Live(
        get_renderable=lambda: Group(table(runs, results), bar.progress, *latest.values()),
        console=console,
        refresh_per_second=2,
        transient=True,  # the sorted table follows
    )
    terminal = console.is_terminal

    def tell(run: Config, text: str) -> None:
        if terminal:
            latest[run.identity()] = Text(text)
        else:
            say(text)

    if jobs > 1:
        ended = side_by_side(waiting, out=out, jobs=jobs, stop=stop, tell=tell, live=terminal)
    else:
        ended = _one_by_one(waiting, out, stop, bar if terminal else Lines(say), live)
    with live if terminal else nullcontext():
        for run, record in ended:
            results[run.identity()] = record
            if not terminal:
                how = "done" if record["completed"] else f"failed: {record['failure']['message']}"
                say(f"{run.title} · {how}")
    return results


def _one_by_one(
    runs: Sequence[Config], out: Path, stop: StopSignals | None, watcher: Watcher, live: Live
) -> Iterator[tuple[Config, Record]]:
    for run in runs:
        if live.is_started:
            live.refresh()  # at once, because a short run may end before the next refresh
        yield run, carry_out(run, out, stop, watcher)
        if stop is not None and stop.received is not None:
            raise Interrupted(stop.received, None)


def table(runs: Sequence[Config], results: Results, *, by_result: bool = False) -> Table:
    """Medians over the finished seeds of each entry, in the file's order or best first."""
    found = rows(runs, results)
    if by_result:
        found.sort(key=lambda row: row.order)
    first = runs[0]
    made = Table(title=f"{shown(first.data.name)}, {shown(first.model.name)}: medians")
    made.add_column("optimizer", overflow="fold")  # a label is not cut
    # Short: with the labels of the demonstration they fit 80 columns.
    for heading in ("runs", "train loss", "test loss", "test error", "time s", "step ms"):
        made.add_column(heading, justify="right")
    for row in found:
        made.add_row(*row.cells)
    return made


def rows(runs: Sequence[Config], results: Results) -> list[Row]:
    """The entries, in the file's order."""
    return [Row(label, runs, results) for label in dict.fromkeys(run.label for run in runs)]


class Row:
    """One entry of the table."""

    def __init__(self, label: str, runs: Sequence[Config], results: Results) -> None:
        mine = [run for run in runs if run.label == label]
        found = [results[run.identity()] for run in mine if run.identity() in results]
        self.label = label
        # Without the curve, which is not shown: the table is made twice a second.
        known = (as_run({**record, "curve": []}) for record in found)
        self.done = done = [run for run in known if run.completed]
        failed = len(found) - len(done)
        self.error = median(run.final["test_error"] for run in done)
        loss = median(run.final["test_loss"] for run in done)
        # Best first: by error, then by loss; failed runs count against an entry.
        measures = (math.inf if math.isnan(value) else value for value in (self.error, loss))
        self.order = (not done, failed, *measures)
        self.cells = (
            escape(label),  # its brackets are not markup
            f"{len(done)}/{len(mine)}" + (f", {failed} failed" if failed else ""),
            _cell(median(run.final["train_loss"] for run in done), "{:.4g}"),
            _cell(loss, "{:.4g}"),
            _cell(self.error, "{:.2%}"),
            _cell(median(run.seconds.get("total", math.nan) for run in done), "{:.1f}"),
            _cell(median(milliseconds(run, "optimizer") for run in done), "{:.2f}"),
        )


def _cell(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)
