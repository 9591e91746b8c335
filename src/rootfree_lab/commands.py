"""The command line: `rootfree` and the subcommands that train and show what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rootfree_lab import data_commands, experiment_commands, measure_commands
from rootfree_lab.loading_torch import loading_torch
from rootfree_lab.shared_options import (
    Assignments,
    ConfigFile,
    Jobs,
    Only,
    Out,
    Records,
    Rollback,
    entry_labels,
)

app = typer.Typer(no_args_is_help=True)
console = Console()


def _version(wanted: bool) -> None:
    if not wanted:
        return
    with loading_torch():
        import torch

        import rootfree
    typer.echo(f"rootfree {rootfree.__version__}, torch {torch.__version__}")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Train, compare and measure optimizers that work without the square root.

    \b
    A first look, in minutes on a CPU:
      rootfree demo
    An experiment of your own:
      rootfree new experiment.toml
      rootfree train experiment.toml
    Several optimizers side by side, and a report:
      rootfree compare configs/small/digits_cnn.toml --out out/digits
      rootfree report out/digits

    COMMAND --help shows the options of a command and examples.
    """


@app.command(rich_help_panel="Experiments")
def demo(
    assignments: Assignments = None,
    out: Annotated[Path, typer.Option(help="Folder for records and the report.")] = Path(
        "out/demo"
    ),
) -> None:
    """Train a small CNN and a small transformer on handwritten digits, with five optimizers.

    Shows a table of each and writes a report.

    \b
    Examples:
      rootfree demo
      rootfree demo --set train.epochs=2 --set 'seeds=[0]'
    """
    with loading_torch():
        from rootfree_lab.demo import run_demo
    from rootfree_lab.exit_codes import with_exit_codes

    def work() -> int:
        run_demo(console, out=out, assignments=assignments or [])
        return 0

    raise typer.Exit(with_exit_codes(work))


@app.command(rich_help_panel="Experiments")
def train(
    config: ConfigFile,
    assignments: Assignments = None,
    out: Out = Path("out"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
    entry: Annotated[
        str | None,
        typer.Option(
            help="Label of the entry to train, where there are several.",
            autocompletion=entry_labels,
        ),
    ] = None,
    rollback: Rollback = None,
) -> None:
    """Train one run of a config: one optimizer, one seed.

    The seed is train.seed, or else the first of seeds. Ctrl-C leaves a checkpoint for --resume. A
    run that is on record is not trained again.

    \b
    Examples:
      rootfree train experiment.toml
      rootfree train configs/small/digits_cnn.toml --entry IFShampoo
      rootfree train experiment.toml --set optimizer.lr=3e-3 --set train.seed=1
      rootfree train experiment.toml --resume
    """
    with loading_torch():
        from rootfree_lab.training_commands import train_command

    given = [*(assignments or []), *_rollback(rollback)]
    code = train_command(console, config, assignments=given, out=out, resume=resume, entry=entry)
    raise typer.Exit(code)


@app.command(rich_help_panel="Experiments")
def compare(
    config: ConfigFile,
    assignments: Assignments = None,
    out: Out = Path("out"),
    only: Only = None,
    jobs: Jobs = 1,
    rollback: Rollback = None,
) -> None:
    """Train every entry of a config with all its seeds, and show the table.

    Runs that are on record are not trained again, so the same command continues after a stop.

    \b
    Examples:
      rootfree compare configs/small/digits_cnn.toml --out out/digits
      rootfree compare experiment.toml --only AdamW --only IFShampoo --jobs 2
      rootfree compare experiment.toml --set 'seeds=[0]' --set train.epochs=3
    """
    with loading_torch():
        from rootfree_lab.training_commands import compare_command

    given = [*(assignments or []), *_rollback(rollback)]
    code = compare_command(console, config, assignments=given, out=out, only=only or [], jobs=jobs)
    raise typer.Exit(code)


def _rollback(times: int | None) -> list[str]:
    return [] if times is None else [f"train.rollback={times}"]


@app.command(rich_help_panel="Results")
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
    from rootfree_lab.report import ReportError, write_report

    try:
        written = write_report(records, out)
    except (ReportError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    for problem in written.problems:
        typer.echo(f"left out: {problem}", err=True)
    typer.echo(f"{written.runs} runs, {len(written.figures)} figures: {written.page}")


app.command(rich_help_panel="Experiments")(experiment_commands.new)
app.command(rich_help_panel="Experiments")(experiment_commands.search)
app.command(rich_help_panel="Results")(experiment_commands.export)
app.command(rich_help_panel="Results")(experiment_commands.evidence)
app.add_typer(data_commands.app, name="data", rich_help_panel="Experiments")
app.command(rich_help_panel="Measurements")(measure_commands.verify)
app.command(rich_help_panel="Measurements")(measure_commands.bench)
app.command("bench-table", rich_help_panel="Measurements")(measure_commands.bench_table)
