"""What `rootfree bench --first-try` does with its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from rootfree_lab.bench.first_try import (
    data,
    entrants,
    records,
    runs,
    sensitivity,
    suite,
    table,
    verdict,
)
from rootfree_lab.bench.first_try import tuned as tuning
from rootfree_lab.bench.first_try.records import Record
from rootfree_lab.bench.first_try.suite import Run
from rootfree_lab.bench.markdown import Marks, fill, filled
from rootfree_lab.bench.options import FirstTry
from rootfree_lab.config.reading import ConfigError, check_names
from rootfree_lab.data import DataError
from rootfree_lab.training.checking import dataset_of
from rootfree_lab.training.devices import choose_device

MARKS = Marks("first try")
HELD_OUT = Marks("held out")
FULL = Marks("full size")
TUNED = Marks("tuned")
SENSITIVITY = Marks("sensitivity")
_WIDTH = 160


def run(console: Console, given: FirstTry) -> int:
    """Pack the data; or train what is missing, then show the table and the verdict."""
    if given.pack is not None:
        for line in data.pack(given.pack, given.data):
            typer.echo(line)
        return 0
    _check(given)
    tasks = suite.chosen(_listed(given.tasks), held_out=given.held_out)
    if given.tuned:
        assert given.json is not None
        found = [r for r in records.read(given.json) if r.task in tasks]
        found = [r for r in found if r.scale == given.scale and not r.constant]
        _show_text(given, tuning.as_markdown(tuning.tuned(found)))
        return 0
    names = _listed(given.optimizers) or (sensitivity.OPTIMIZERS if given.sensitivity else ())
    field = plain = entrants.line_up(names, given.assignments or [])
    if given.sensitivity:
        field = sensitivity.with_changes(plain)
    failed = 0
    if given.table_only:
        assert given.json is not None
        found = records.read(given.json)
    else:
        asked = _runs(given, _with_data(tasks, given.data), _installed(field))
        trained, failed = runs.perform(
            asked, given.json, jobs=given.jobs, say=lambda line: typer.echo(line, err=True)
        )
        found = trained if given.json is None else records.read(given.json)
    found = _as_asked(given, [r for r in found if r.task in tasks and r.scale == given.scale])
    if given.sensitivity:
        found = [r for r in found if r.constant == given.constant]
        _needs_runs(given, found)
        _show_text(given, sensitivity.as_markdown(found, plain))
    else:
        _show(console, given, found)
    return 1 if failed else 0


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _runs(given: FirstTry, tasks: Sequence[str], field: Sequence[entrants.Entrant]) -> list[Run]:
    """Seeds outermost: a file that is cut short has something of everything."""
    device = str(choose_device(given.device or "auto", "--device"))
    return [
        Run(
            Record(
                task=task,
                optimizer=entrant.name,
                label=entrant.label,
                options=entrant.effective(),
                seed=seed,
                scale=given.scale,
                steps=suite.steps_of(task, given.scale, constant=given.constant, steps=given.steps),
                constant=given.constant,
                device=device,
            ),
            entrant,
            given.data,
        )
        for seed in range(given.seeds)
        for task in tasks
        for entrant in field
        if suite.is_convex(task) or not entrant.convex_only
    ]


def _with_data(tasks: Sequence[str], folder: Path | None) -> list[str]:
    """The tasks whose data is there; a line for each of the others."""
    found = []
    for task in tasks:
        compact = suite.data_of(task)
        try:
            if compact is None:
                dataset_of(suite.data_config(task, "small", folder))
            else:
                data.dataset(compact, folder)
        except DataError as error:
            typer.echo(f"skipped {task}: {error}", err=True)
            continue
        found.append(task)
    return found


def _installed(field: Sequence[entrants.Entrant]) -> list[entrants.Entrant]:
    missing = dict.fromkeys(e.name for e in field if not entrants.available(e.name))
    for name in missing:
        typer.echo(f"skipped {name}: the installed version does not have it", err=True)
    return [entrant for entrant in field if entrant.name not in missing]


def _as_asked(given: FirstTry, found: Sequence[Record]) -> list[Record]:
    """The records with the number of steps that was asked for, by default the task's own."""
    return [
        r
        for r in found
        if r.steps == suite.steps_of(r.task, r.scale, constant=r.constant, steps=given.steps)
    ]


def _show(console: Console, given: FirstTry, found: Sequence[Record]) -> None:
    """Runs with a schedule and those with a constant rate are two tables and one verdict."""
    scheduled = [r for r in found if not r.constant]
    if not console.is_terminal:  # a file has room
        console = Console(width=max(console.width, _WIDTH))
    plain, constant = table.cells(scheduled), table.cells(r for r in found if r.constant)
    for cells, title in ((plain, "first try"), (constant, "first try, constant learning rate")):
        if cells:
            console.print(table.as_table(cells, f"{title}, scale {given.scale}"))
    bars = verdict.bars(plain, constant)
    for bar in bars:
        line = f"({bar.letter}) {bar.label}: {bar.verdict}"
        detail = f" on {bar.tasks} tasks ({bar.demand}); {bar.found}" if bar.tasks else ""
        console.print(line + detail, highlight=False, markup=False, soft_wrap=True)
    if given.page is not None:
        _needs_runs(given, scheduled)
        pieces = (table.as_markdown(plain), table.remarks(scheduled), verdict.as_markdown(bars))
        fill(given.page, "\n\n".join(piece.strip() for piece in pieces), _marks(given))


def _needs_runs(given: FirstTry, found: Sequence[Record]) -> None:
    if given.page is not None and not found:
        raise ConfigError("--page: there are no runs of that kind to write")


def _marks(given: FirstTry) -> Marks:
    """Where in a page the tables go."""
    if given.tuned or given.sensitivity:
        return TUNED if given.tuned else SENSITIVITY
    if given.held_out:
        return HELD_OUT
    return FULL if given.scale == "full" else MARKS


def _show_text(given: FirstTry, text: str) -> None:
    """On the terminal or in a page."""
    if given.page is None:
        typer.echo(text)
    else:
        fill(given.page, text, _marks(given))


def _check(given: FirstTry) -> None:
    """Before minutes of training, not after them."""
    check_names("--scale:", [given.scale], suite.SCALES)
    if given.tuned and given.sensitivity:
        raise ConfigError("--sensitivity has no place beside --tuned")
    for option, asked in (("--table-only", given.table_only), ("--tuned", given.tuned)):
        if asked and (given.json is None or not given.json.is_file()):
            raise ConfigError(f"{option} needs --json with a file that has runs")
    if given.json is not None and not given.json.parent.is_dir():
        raise ConfigError(f"--json: there is no folder {str(given.json.parent)!r}")
    if given.data is not None and not given.data.is_dir():
        raise ConfigError(f"--data: there is no folder {str(given.data)!r}")
    if given.page is not None:
        filled(given.page, "", _marks(given))
