"""The subcommands of `rootfree`: arguments in, one function call, a table out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
console = Console()

Seeds = Annotated[int, typer.Option(min=1, help="Runs per optimizer; the table shows the median.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the training data.")]


@app.callback()
def _root() -> None:
    """Optimizers without the square root: train, compare, measure."""


@app.command()
def demo(seeds: Seeds = 3, epochs: Epochs = 30) -> None:
    """Train a small convolutional network on handwritten digits with several optimizers."""
    from rootfree_lab.demo import run_demo

    console.print(run_demo(seeds=seeds, epochs=epochs))


@app.command()
def bench(
    shapes: Annotated[str, typer.Option(help="Set of parameter shapes to step on.")] = "vit_b",
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="Optimizer to time, repeatable; the first is the reference."),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of two steps per optimizer.")] = 5,
) -> None:
    """Time one step of each optimizer, side by side, as ratios to the first."""
    from rootfree_lab.bench import OPTIMIZERS, run_bench

    console.print(run_bench(shapes, optimizer or list(OPTIMIZERS), turns=turns))


@app.command()
def verify(
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a claim to check; may be given repeatedly.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random draw.")] = 0,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write the figures to.")
    ] = None,
) -> None:
    """Check the paper's claims numerically on the library, one line a claim."""
    from rootfree_lab.verify import report

    try:
        claims = report.chosen(only or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    if json is not None and not json.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(json.parent)!r}", param_hint="--json")
    results = []
    for claim, measured in report.measure(claims, seed=seed):
        results.append((claim, measured))
        if not console.is_terminal:
            typer.echo(report.line(claim, measured))
    if console.is_terminal:
        console.print(report.as_table(results))
    if json is not None:
        json.write_text(report.as_json(results, seed=seed), encoding="utf-8")
    if not all(measured.passed for _, measured in results):
        raise typer.Exit(1)
