"""`rootfree train` and `rootfree compare`: what they print, and the exit codes they end with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import typer
from rich.console import Console

from rootfree_lab.checkpoints import checkpoint_path
from rootfree_lab.compare import compare, table
from rootfree_lab.config_files import load_comparison, load_config
from rootfree_lab.config_reading import ConfigError, parse_assignment, unknown_name
from rootfree_lab.exit_codes import FAILED, with_exit_codes
from rootfree_lab.parallel import speaks
from rootfree_lab.progress import Lines, LiveBar, Watcher, describe_point, plain_lines
from rootfree_lab.records import Record
from rootfree_lab.stopping import StopSignals
from rootfree_lab.training import finished_record, records_path, sweep, train


def train_command(
    console: Console,
    config_file: Path,
    *,
    assignments: Sequence[str],
    out: Path,
    resume: bool,
    entry: str | None,
) -> int:
    """Train the run that a config describes."""

    say = typer.echo if speaks() else _silent

    def work() -> int:
        _check_one_seed(assignments)
        config = load_config(config_file, assignments, entry)
        recorded = finished_record(out, config)
        if recorded is not None:
            sweep(out, config)
            say(f"this run is in {records_path(out)} already; another --out trains it again")
            return _ended(say, recorded)
        checkpoint = checkpoint_path(out, config)
        if checkpoint.exists() and not resume:
            say(f"starts anew; --resume would go on from {checkpoint}", err=True)
        elif resume and not checkpoint.exists():
            say(f"there is no {checkpoint}: starts from the beginning", err=True)
        bar = LiveBar(console) if console.is_terminal else None
        watchers: list[Watcher] = [Lines(plain_lines(console)) if bar is None else bar]
        with StopSignals() as stop, bar or nullcontext():
            record = train(config, out=out, resume=resume, stop=stop, watchers=watchers)
        code = _ended(say, record)
        say(f"recorded in {records_path(out)}")
        return code

    return with_exit_codes(work)


def _check_one_seed(assignments: Sequence[str]) -> None:
    for text in assignments:
        name, value = parse_assignment(text)
        if name.rpartition(".")[2] == "seeds" and isinstance(value, list) and len(value) > 1:
            raise ConfigError(
                f"--set {name} must name one seed for train, got {value}: rootfree compare trains "
                "several"
            )


def _ended(say: Callable[..., None], record: Record) -> int:
    """Say how a run ended."""
    name = f"{record['label']} seed {record['seed']}"
    if not record["completed"]:
        say(f"{name} failed: {record['failure']['message']}", err=True)
        return FAILED
    say(f"{name} · {describe_point(record['curve'][-1])}")
    return 0


def _silent(message: str, *, err: bool = False) -> None:
    """Another process says it."""


def compare_command(
    console: Console,
    config_file: Path,
    *,
    assignments: Sequence[str],
    out: Path,
    only: Sequence[str],
    jobs: int,
) -> int:
    """Run a config's entries and print the table, best first."""

    def work() -> int:
        runs = load_comparison(config_file, assignments)
        labels = list(dict.fromkeys(run.label for run in runs))
        for label in only:
            if label not in labels:
                raise unknown_name("--only: the entry", label, labels)
        chosen = [run for run in runs if not only or run.label in only]
        with StopSignals() as stop:
            results = compare(chosen, out=out, console=console, stop=stop, jobs=jobs)
        console.print(table(chosen, results, by_result=True))
        typer.echo(f"records: {records_path(out)}")
        failed = [r for r in results.values() if not r["completed"]]
        for record in failed:
            typer.echo(
                f"{record['label']} seed {record['seed']} failed: {record['failure']['message']}",
                err=True,
            )
        # A comparison in which some diverge is a result; one without any result is not.
        return FAILED if len(failed) == len(results) else 0

    return with_exit_codes(work)
