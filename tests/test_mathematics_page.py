"""docs/mathematics.md names functions that are where it says, and every rule."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(\w+)`\s+in\s+`([\w/]+\.py)`")


@cache
def defined(path: str) -> set[str]:
    """The functions, methods and classes of a file under src/."""
    tree = ast.parse((ROOT / "src" / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def named() -> set[tuple[str, str]]:
    text = (ROOT / "docs" / "mathematics.md").read_text(encoding="utf-8")
    found = NAMED.findall(text)
    assert len(re.findall(r"`[\w/]+\.py`", text)) == len(found), "a file without a function"
    return {(path, name) for name, path in found}


def test_every_function_is_where_the_page_says():
    missing = [f"{path}: {name}" for path, name in named() if name not in defined(path)]
    assert missing == []


def test_every_rule_is_on_the_page():
    rules = sorted((ROOT / "src" / "rootfree" / "rules").glob("*.py"))
    assert len(rules) > 5
    for path in rules:
        relative = str(path.relative_to(ROOT / "src"))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        public = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }
        assert {(relative, name) for name in public} <= named()
