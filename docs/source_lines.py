"""The page of the mathematics names functions and files; the site adds the lines."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1] / "src"
NAMED = re.compile(r"`(\w+)`(\s+in\s+)`([\w/]+\.py)`")


@cache
def lines(path: str) -> dict[str, int]:
    """The line of every function, method and class of a file under src/; the first of a name."""
    tree = ast.parse((SOURCES / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = [(node.lineno, node.name) for node in ast.walk(tree) if isinstance(node, kinds)]
    return {name: line for line, name in sorted(found, reverse=True)}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page, before it is rendered."""
    if page.file.src_uri != "mathematics.md":
        return markdown
    return NAMED.sub(lambda m: f"`{m[1]}`{m[2]}`{m[3]}:{lines(m[3])[m[1]]}`", markdown)
