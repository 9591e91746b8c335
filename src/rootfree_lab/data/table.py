"""The table of `rootfree data list`."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from rootfree_lab.data.loading import status
from rootfree_lab.data.registry import SOURCES


def sources_table(cache: Path | None = None) -> Table:
    """One row a data set: what it is, whether it is here, how to get it."""
    table = Table(title="Data sets")
    for heading in ("name", "kind", "size", "status", "how to get it"):
        # Folded, not cut: a name that does not fit goes on in the next line.
        table.add_column(heading, no_wrap=heading in ("name", "status"), overflow="fold")
    for source in SOURCES.values():
        how = f"rootfree data fetch {source.name}" if source.ways else source.how
        here = status(source.name, cache=cache)
        # Escaped: brackets would be taken for a style.
        table.add_row(source.name, source.kind, source.size, here, escape(how))
    return table
