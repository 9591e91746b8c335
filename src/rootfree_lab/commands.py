"""The subcommands of `rootfree`: arguments in, one function call, a table out."""

from __future__ import annotations

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
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per optimizer.")] = 10,
) -> None:
    """Time one step of each optimizer, side by side, as ratios to torch's."""
    from rootfree_lab.bench import run_bench

    console.print(run_bench(shapes, steps=steps))
