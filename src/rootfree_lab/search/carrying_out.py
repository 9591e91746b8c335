"""A search from its entries to its results: what is printed and written on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from rootfree_lab.config.reading import Table
from rootfree_lab.processes.stopping import StopSignals
from rootfree_lab.search import results
from rootfree_lab.search.dashboard import serve
from rootfree_lab.search.display import Display, summary
from rootfree_lab.search.ledger import Ledger
from rootfree_lab.search.loop import search
from rootfree_lab.search.settings import Claim, Entry
from rootfree_lab.search.storage import in_words, open_storage
from rootfree_lab.training.run import make_output_folder, records_path


def carry_out_search(
    console: Console,
    entries: Sequence[Entry],
    tables: Table,
    *,
    out: Path,
    storage: str | None,
    name: str,
    jobs: int,
    retry_failed: bool,
    port: int | None,
) -> Path | None:
    """Carry out every trial; the config with the best settings, None where none has completed."""
    make_output_folder(out)
    where = storage or str(out / "journal.log")
    with in_words(where):
        ledger = Ledger(open_storage(where), name, list(entries), retry_failed=retry_failed)
        results.write_records(ledger, out)
        if port is not None:
            typer.echo(f"dashboard: {serve(where, port)}")
        display = Display(console, ledger)

        def say(claim: Claim, kind: str, content: Any) -> None:
            display(claim, kind, content)
            if kind == "ended":
                results.write_best(ledger, tables, out)

        with StopSignals() as stop, display.live:
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
    return best
