"""Writes tables as readable TOML, which `config.reading.read_toml` reads back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rootfree_lab.config.reading import Table
from rootfree_lab.files.durable import replace_text

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_INLINE = ("low", "high", "choices")  # what makes a table a range of values: kept on one line


def toml(tables: Mapping[str, Any]) -> str:
    """The text of a TOML document."""
    return "\n".join(_lines(tables, "")).strip("\n") + "\n"


def write_toml(path: Path, tables: Table, *, remarks: list[str]) -> None:
    """Write a document with remarks at its head; the file is always the complete old or new one."""
    head = "".join(f"# {remark}".rstrip() + "\n" for remark in remarks)
    replace_text(path, f"{head}\n{toml(tables)}")


def _lines(table: Mapping[str, Any], prefix: str) -> list[str]:
    """Plain values come first, because lines after a header in brackets belong to it."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if not _has_header(v)]
    for key, value in table.items():
        name = f"{prefix}{_key(key)}"
        if not _has_header(value):
            continue
        for each in value if isinstance(value, list) else [value]:
            header = f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            inner = _lines(each, f"{name}.")
            alone = header.startswith("[[") or not each or inner[0] != ""
            lines += ["", header, *inner] if alone else inner
    return lines


def _has_header(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not any(key in value for key in _INLINE)
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (int, float)):
        return repr(value)  # inf, nan and 1e-05 are TOML too
    raise TypeError(f"TOML has no {type(value).__name__}: {value!r}")


def _string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
