"""`rootfree search`: what it checks, prints and writes, and the exit codes it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from rootfree_lab.config_files import read_tables
from rootfree_lab.config_reading import unknown_name
from rootfree_lab.exit_codes import FAILED, with_exit_codes
from rootfree_lab.needed import need
from rootfree_lab.stopping import StopSignals
from rootfree_lab.training import make_output_folder, records_path


def search_command(console: Console, config: Path, **given: Any) -> int:
    """Search for the settings of a config's optimizers."""
    return with_exit_codes(lambda: _search(console, config, **given))


def _search(
    console: Console,
    config: Path,
    *,
    assignments: Sequence[str],
    out: Path | None,
    storage: str | None,
    name: str | None,
    jobs: int,
    only: Sequence[str],
    retry_failed: bool,
    dashboard: int | None,
) -> int:
    need("rootfree search", "optuna", "rootfree[search]")
    if dashboard is not None:
        need("--dashboard", "optuna_dashboard", "optuna-dashboard")
    # What follows imports Optuna.
    from rootfree_lab.search import results, settings
    from rootfree_lab.search.dashboard import serve
    from rootfree_lab.search.display import Display, summary
    from rootfree_lab.search.ledger import Ledger
    from rootfree_lab.search.loop import search
    from rootfree_lab.search.storage import in_words, open_storage

    entries = settings.load_entries(config, assignments)
    entries = _chosen(entries, only)
    settings.check(entries)
    out = out or Path("out/search") / config.stem
    make_output_folder(out)
    where = storage or str(out / "journal.log")
    tables = read_tables(config, assignments)
    with in_words(where):
        ledger = Ledger(
            open_storage(where), name or config.stem, entries,
            retry_failed=retry_failed,
        )  # fmt: skip
        results.write_records(ledger, out)
        if dashboard is not None:
            typer.echo(f"dashboard: {serve(where, dashboard)}")

        def say(claim: Any, kind: str, content: Any) -> None:
            display(claim, kind, content)
            if kind == "ended":
                results.write_best(ledger, tables, out)

        with StopSignals() as stop, Display(console, ledger) as display:
            search(ledger, out=out, jobs=jobs, stop=stop, say=say)
        results.write_records(ledger, out)
        results.sweep_checkpoints(ledger, out)
        best = results.write_best(ledger, tables, out)
        console.print(summary(ledger))
        for label in ledger.entries:
            for status in ledger.statuses(label):
                if status.failure is not None:
                    typer.echo(f"{status.slot.name} failed: {status.failure.message}", err=True)
    typer.echo(f"records: {records_path(out)}")
    if best is None:
        typer.echo("no trial has completed", err=True)
        return FAILED
    typer.echo(f"best settings: {best}; final runs: rootfree compare {best}")
    return 0


def _chosen(entries: list[Any], only: Sequence[str]) -> list[Any]:
    labels = [entry.label for entry in entries]
    for label in only:
        if label not in labels:
            raise unknown_name("--only: the entry", label, labels)
    return [entry for entry in entries if not only or entry.label in only]
