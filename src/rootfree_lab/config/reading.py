"""Converts tables of TOML and JSON to frozen dataclasses; checks types and refuses unknown keys.

Nothing here depends on particular settings; settings.py has those.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
Table = dict[str, Any]

# Words and paths, which need no quotes after --set.
_BARE_WORD = re.compile(r"(?:[A-Za-z_]|~|\.{0,2}/)[^\"'\[\]{}=,#]*\Z")


_MOST_PARTS = 1000
_DEEPEST = 50


class ConfigError(ValueError):
    """A setting that is missing, misspelt or of the wrong kind."""


def read_toml(path: Path) -> Table:
    """The tables of a file."""
    try:
        text = path.read_text(encoding="utf-8")
        return _parsed(text)
    except RecursionError as error:
        raise ConfigError(f"{path}: its values are nested too deeply") from error
    except FileNotFoundError as error:
        raise ConfigError(f"there is no config file {str(path)!r}") from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {str(path)!r} is not a UTF-8 text file") from error
    except ValueError as error:  # among them integers of thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _parsed(text: str) -> Table:
    """The tables of a text; RecursionError if they are too deep for later recursive functions."""
    # Checked before parsing: the parser's time grows with the square of the parts of a key.
    if any(part.count(".") > _MOST_PARTS for part in re.split(r"[={},\[\]\n]", text)):
        raise RecursionError
    tables = tomllib.loads(text)
    if _too_deep(tables):
        raise RecursionError
    return tables


def _too_deep(value: Any) -> bool:
    """Whether tables and lists are nested too deeply for later recursive functions."""
    level = [value]
    for _ in range(_DEEPEST):
        tables = [v for v in level if isinstance(v, Mapping)]
        lists = [v for v in level if isinstance(v, list)]
        level = [part for v in tables for part in v.values()] + [part for v in lists for part in v]
        if not level:
            return False
    return True


def unknown_name(what: str, name: str, allowed: Iterable[str]) -> ConfigError:
    """The error for a name that is not among the allowed ones, with the nearest one."""
    allowed = list(allowed)
    if not allowed:
        return ConfigError(f"{what} {name!r} is unknown: there are none")
    close = get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return ConfigError(f"{what} {name!r} is unknown{hint} allowed: {', '.join(allowed)}")


def check_names(what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise if one of the names is not among the allowed ones."""
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            raise unknown_name(what, name, allowed)


def build(kind: type[T], table: Any, where: str) -> T:
    """A dataclass from a table; `where` is the table's name in messages."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    hints = get_type_hints(kind)
    allowed = [f"{where}.{field.name}" for field in fields(kind)]  # type: ignore[arg-type]
    check_names("the setting", [f"{where}.{key}" for key in table], allowed)
    for field in fields(kind):  # type: ignore[arg-type]
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in table:
            raise ConfigError(f"{where}.{field.name} is missing")
    values = {key: checked(f"{where}.{key}", value, hints[key]) for key, value in table.items()}
    try:
        return kind(**values)
    except ConfigError:
        raise
    except ValueError as error:  # the dataclass's own check of a range
        raise ConfigError(f"{where}.{error}") from error


def checked(name: str, value: Any, kind: Any) -> Any:
    """The value converted to the kind, or an error that names both."""
    if is_dataclass(kind) and isinstance(value, Mapping):
        return build(kind, value, name)  # type: ignore[arg-type]
    if get_origin(kind) is list and isinstance(value, list):
        (element,) = get_args(kind)
        return [checked(f"{name}[{i}]", part, element) for i, part in enumerate(value)]
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value == "none" and type(None) in options:  # TOML has no null
        return None
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        wanted = " or ".join(_words(option) for option in options if option is not type(None))
        raise ConfigError(f"{name} must be {wanted}, got {value!r}") from error


def _words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list ({_words(get_args(kind)[0])} each)"
    if get_origin(kind) is dict or is_dataclass(kind):
        return "a table"
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(
        kind, "a list"
    )


def parse_assignment(text: str) -> tuple[str, Any]:
    """`a.b=value` with a TOML value; a bare word is a string, for convenience."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise ConfigError(f"--set takes NAME=VALUE, got {text!r}")
    if key.count(".") > _DEEPEST:
        raise ConfigError(f"--set takes NAME=VALUE, got a name of {key.count('.') + 1:,} parts")
    try:
        return key, _parsed(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        if _BARE_WORD.match(value):
            return key, value
        raise ConfigError(f"--set {key}: {value!r} is not a TOML value") from error
    except RecursionError as error:
        raise ConfigError(f"--set {key}: its value is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"--set {key}: {error}") from error


def assign(table: Table, path: list[str], value: Any, where: str) -> None:
    """Set one entry of nested tables in place; missing tables are made."""
    for key in path[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {key!r} is not a table")
    table[path[-1]] = value


def merged(base: Table, over: Mapping[str, Any]) -> Table:
    """`base` overridden by the entries of `over`, table by table; neither is changed."""
    result = dict(base)
    for key, value in over.items():
        mine = result.get(key)
        both = isinstance(mine, dict) and isinstance(value, Mapping)
        result[key] = merged(mine, value) if both else value  # type: ignore[arg-type]
    return result


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options as functions expect them: tuples where TOML has lists, None where it has "none".

    A companion's name is left alone: there "none" is a name.
    """
    return {key: value if key == "companion" else _plain(value) for key, value in options.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_plain(part) for part in value)
    if isinstance(value, dict):
        return plain_options(value)
    return None if value == "none" else value
