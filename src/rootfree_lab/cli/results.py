"""Subcommands that show recorded runs: a report, a CSV file, the page of the evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rootfree_lab.cli.options import Records


def report(
    records: Records,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; default: report/ beside the records.")
    ] = None,
) -> None:
    """Make a page, figures and a LaTeX table of recorded runs.

    \b
    Examples:
      rootfree report out/digits
      rootfree report results --out page
    """
    from rootfree_lab.report import write_report

    written = write_report(records, out)
    _say_left_out(written.problems)
    runs = f"{written.runs} run{'s' if written.runs != 1 else ''}"
    typer.echo(f"{runs}, {len(written.figures)} figures: {written.page}")


def export(
    records: Records,
    out: Annotated[Path, typer.Option(dir_okay=False, help="File to write.")] = Path("runs.csv"),
    curves: Annotated[
        bool, typer.Option("--curves", help="A row for each point of a curve, not for each run.")
    ] = False,
) -> None:
    """Write recorded runs as CSV, for a spreadsheet or pandas.

    \b
    Examples:
      rootfree export out/digits --out runs.csv
      rootfree export out/digits --out curves.csv --curves
    """
    from rootfree_lab.report.export import export as write

    rows, problems = write(records, out, curves=curves)
    _say_left_out(problems)
    typer.echo(f"{rows} row{'' if rows == 1 else 's'}: {out}")


def evidence(
    results: Annotated[
        Path, typer.Argument(help="Folder with one folder a config, as search and compare write.")
    ] = Path("results"),
    out: Annotated[Path, typer.Option(dir_okay=False, help="Page to write.")] = Path(
        "docs/evidence.md"
    ),
) -> None:
    """Write the page with the paper's tables beside ours, and which claims hold.

    \b
    Examples:
      rootfree evidence
      rootfree evidence results --out docs/evidence.md
    """
    from rootfree_lab.evidence import write_evidence

    plots = write_evidence(results, out)
    typer.echo(f"{out}, {plots} plots")


def _say_left_out(problems: tuple[str, ...] | list[str]) -> None:
    for problem in problems:
        typer.echo(f"left out: {problem}", err=True)
