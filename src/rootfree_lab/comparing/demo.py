"""A first look: a small CNN and a small vision transformer on real images, six optimizers each.

The settings are stored in demo_configs/, each with the grid that it was chosen from; the runs are
those of `rootfree compare`, carried out anew every time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from rootfree_lab.comparing.compare import Results, compare, rows, table
from rootfree_lab.config.files import load_comparison
from rootfree_lab.config.needed import need
from rootfree_lab.config.settings import Config
from rootfree_lab.processes.stopping import StopSignals
from rootfree_lab.report import write_report
from rootfree_lab.training.run import make_output_folder, records_path

CONFIGS = ("small_cnn.toml", "small_vit.toml")


def run_demo(console: Console, *, out: Path, assignments: Sequence[str] = ()) -> None:
    """Train, show the tables, write the report, name the winners."""
    need("the report", "matplotlib")
    start = time.perf_counter()
    make_output_folder(out)
    records_path(out).unlink(missing_ok=True)  # nothing is taken from an earlier demonstration
    winners = []
    with StopSignals() as stop:
        for name in CONFIGS:
            with as_file(files("rootfree_lab.comparing") / "demo_configs" / name) as path:
                runs = load_comparison(path, assignments)
            results = compare(runs, out=out, console=console, stop=stop)
            console.print(table(runs, results, by_result=True))
            winners.append(_winner(runs, results))
    page = write_report(out).page
    console.print("\n".join(["", "Lowest median test error", *winners]), highlight=False)
    console.print(f"{time.perf_counter() - start:.0f} seconds; report: {page}", soft_wrap=True)


def _winner(runs: Sequence[Config], results: Results) -> str:
    """The optimizer with the lowest median test error, and loss where errors are equal."""
    best = min(rows(runs, results), key=lambda row: row.order)
    if not best.done:
        last = list(results.values())[-1]
        raise ValueError(f"no run came to its end: {last['failure']['message']}")
    model, seeds = best.done[0].model, len(best.done)
    return f"{model}: {best.label}, {best.error:.2%} over {seeds} seed{'s' if seeds > 1 else ''}"
