"""Jinja2 as the laboratory uses it."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def templates(package: str) -> Environment:
    """The templates of a package: HTML is escaped, and a name that is not given is an error."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=lambda name: name is None or name.endswith((".html", ".css", ".js")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
