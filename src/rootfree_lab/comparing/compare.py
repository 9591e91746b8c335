"""Compare: every entry and seed of a config, what is done already left alone, and a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from rootfree_lab.comparing.many_runs import LatestLines, carry_out, side_by_side
from rootfree_lab.config.own_code import shown
from rootfree_lab.config.settings import Config
from rootfree_lab.files import checkpoints
from rootfree_lab.files.checkpoints import checkpoint_path
from rootfree_lab.files.records import Record
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.training.checking import check
from rootfree_lab.training.run import finished_record, make_output_folder, records_path, sweep
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
    """Carry out the runs that have no record yet; a failing one is recorded, the rest go on.

    Interrupted runs are continued from their checkpoints. Where one of these belongs to other
    settings nothing is run: somebody may still want it. Nor is anything where data are missing or
    a name is unknown in one of the runs: that is to be corrected first. With `jobs` so many runs
    are carried out side by side, each in a process.
    """
    make_output_folder(out)
    results = {r.identity(): done for r in runs if (done := finished_record(out, r)) is not None}
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
    bar, beside = Bar(), LatestLines()
    live = Live(
        get_renderable=lambda: Group(table(runs, results), bar.renderable, beside.renderable),
        console=console,
        refresh_per_second=2,
        transient=True,  # the sorted table follows
    )
    terminal = console.is_terminal
    if jobs > 1:
        tell = beside if terminal else lambda run, text: say(text)
        ended = side_by_side(waiting, out=out, jobs=jobs, stop=stop, tell=tell, live=terminal)
    else:
        ended = _one_by_one(waiting, out, stop, bar if terminal else Lines(say), live)
    with live if terminal else nullcontext():
        for run, record in ended:
            results[run.identity()] = record
            if not terminal:
                say(_outcome(run, record))
    return results


def _one_by_one(
    runs: Sequence[Config], out: Path, stop: StopSignals | None, watcher: Watcher, live: Live
) -> Iterator[tuple[Config, Record]]:
    for run in runs:
        if live.is_started:
            live.refresh()  # at once: a short run may end before the next turn of the clock
        yield run, carry_out(run, out, stop, watcher)
        if stop is not None and stop.received is not None:
            raise Interrupted(stop.received, None)


def _outcome(run: Config, record: Record) -> str:
    name = f"{run.label} seed {run.train.seed}"
    if record["completed"]:
        return f"{name} · done"
    return f"{name} · failed: {record['failure']['message']}"


def table(runs: Sequence[Config], results: Results, *, by_result: bool = False) -> Table:
    """Medians over the finished seeds of each entry, in the file's order or best first."""
    rows = ranked(runs, results) if by_result else _rows(runs, results)
    first = runs[0]
    made = Table(title=f"{shown(first.data.name)}, {shown(first.model.name)}: medians")
    made.add_column("optimizer", overflow="fold")  # a label is not cut
    for heading in ("runs", "training loss", "test loss", "test error", "seconds", "optimizer ms"):
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(*row.cells)
    return made


def ranked(runs: Sequence[Config], results: Results) -> list[Row]:
    """The entries, best first."""
    return sorted(_rows(runs, results), key=lambda row: row.order)


def _rows(runs: Sequence[Config], results: Results) -> list[Row]:
    return [Row(label, runs, results) for label in dict.fromkeys(run.label for run in runs)]


class Row:
    """One entry of the table."""

    def __init__(self, label: str, runs: Sequence[Config], results: Results) -> None:
        mine = [run for run in runs if run.label == label]
        found = [results[run.identity()] for run in mine if run.identity() in results]
        self.label = label
        self.done = done = [record for record in found if record["completed"]]
        failed = len(found) - len(done)

        def mid(section: str, key: str) -> float | None:
            return _median(record[section].get(key) for record in done)

        self.error = error = mid("final", "test_error")
        loss = mid("final", "test_loss")
        optimizer = _median(
            _quotient(record["seconds"].get("optimizer"), record["steps"]) for record in done
        )
        # Best first: by error, then by loss; failed runs count against an entry.
        self.order = (
            not done,
            failed,
            float("inf") if error is None else error,
            float("inf") if loss is None else loss,
        )
        self.cells = (
            escape(label),  # brackets in it are no markup
            f"{len(done)}/{len(mine)}" + (f", {failed} failed" if failed else ""),
            _cell(mid("final", "train_loss"), "{:.4g}"),
            _cell(loss, "{:.4g}"),
            _cell(error, "{:.2%}"),
            _cell(mid("seconds", "total"), "{:.1f}"),
            _cell(None if optimizer is None else 1e3 * optimizer, "{:.2f}"),
        )


def _median(values: Iterable[Any]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def _quotient(a: float | None, b: float) -> float | None:
    return None if a is None or not b else a / b


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
