"""The command line: `rootfree` and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from rootfree_lab.cli import data, experiments, measurements, results
from rootfree_lab.cli.exits import ends
from rootfree_lab.cli.terminal import loading_torch

app = typer.Typer(no_args_is_help=True)


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


_PANELS = {
    "Experiments": (
        experiments.demo, experiments.train, experiments.compare, experiments.new,
        experiments.search,
    ),
    "Results": (results.report, results.export, results.evidence),
    "Measurements": (measurements.verify, measurements.bench, measurements.bench_table),
}  # fmt: skip
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(_command.__name__.replace("_", "-"), rich_help_panel=_panel)(ends(_command))
app.add_typer(data.app, name="data", rich_help_panel="Experiments")
