"""Subcommands around experiments: a config to start from, search, records as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rootfree_lab.loading_torch import loading_torch
from rootfree_lab.shared_options import Assignments, ConfigFile, Jobs, Only, Records


def search(
    config: ConfigFile,
    assignments: Assignments = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results; default: out/search/ and the config's name."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Journal file, or an Optuna URL such as postgresql://HOST/DB, which many machines "
            "can share; default: journal.log in the folder."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the search in the storage; default: the config's.")
    ] = None,
    jobs: Jobs = 1,
    only: Only = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Carry out trials again that failed.")
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve Optuna's dashboard on this machine.")
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of --dashboard.")] = 8080,
) -> None:
    """Search for the settings of every optimizer of a config, with the same budget for each.

    Writes the best ones as a config. The same command continues after a stop.

    \b
    Examples:
      rootfree search configs/small/digits_cnn.toml --jobs 4
      rootfree compare out/search/digits_cnn/best.toml --out out/final
    """
    from rootfree_lab import commands

    with loading_torch():
        from rootfree_lab.search.command import search_command

    code = search_command(
        commands.console, config, assignments=assignments or [], out=out, storage=storage,
        name=name, jobs=jobs, only=only or [], retry_failed=retry_failed,
        dashboard=port if dashboard else None,
    )  # fmt: skip
    raise typer.Exit(code)


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
    from rootfree_lab.exit_codes import with_exit_codes
    from rootfree_lab.report.export import export as write

    def work() -> int:
        rows, problems = write(records, out, curves=curves)
        for problem in problems:
            typer.echo(f"left out: {problem}", err=True)
        typer.echo(f"{rows} rows: {out}")
        return 0

    raise typer.Exit(with_exit_codes(work))


def new(
    path: Annotated[
        Path, typer.Argument(dir_okay=False, help="File to write; one that is there is kept.")
    ] = Path("experiment.toml"),
) -> None:
    """Write a commented config to start from.

    \b
    Example:
      rootfree new experiment.toml
    """
    from rootfree_lab.exit_codes import with_exit_codes
    from rootfree_lab.new_config import write_new

    def work() -> int:
        write_new(path)
        typer.echo(f"wrote {path}; try: rootfree train {path}")
        return 0

    raise typer.Exit(with_exit_codes(work))


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
    from rootfree_lab.exit_codes import with_exit_codes

    def work() -> int:
        plots = write_evidence(results, out)
        typer.echo(f"{out}, {plots} plots")
        return 0

    raise typer.Exit(with_exit_codes(work))
