"""docs/mathematics.md names functions that are where it says, and every rule."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "mathematics.md").read_text(encoding="utf-8")
HOOK = runpy.run_path(str(ROOT / "docs" / "source_lines.py"))


def named() -> set[tuple[str, str]]:
    found = HOOK["NAMED"].findall(PAGE)
    assert len(re.findall(r"`[\w/]+\.py`", PAGE)) == len(found), "a file without a function"
    return {(path, name) for name, _, path in found}


def test_every_function_is_where_the_page_says():
    missing = [f"{path}: {name}" for path, name in named() if name not in HOOK["lines"](path)]
    assert missing == []


def test_the_site_names_the_line_of_every_function():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="mathematics.md"))
    text = HOOK["on_page_markdown"](PAGE, page=page)
    found = re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py):(\d+)`", text)
    assert {(path, name) for name, path, _ in found} == named()
    for name, path, number in found:
        source = (ROOT / "src" / path).read_text(encoding="utf-8").splitlines()
        assert re.match(rf"\s*(?:def|class) {name}\b", source[int(number) - 1]), (path, name)


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
