"""Spaces: the settings that a search varies for an optimizer, shipped or from the config."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache, partial
from importlib.resources import as_file, files
from typing import Any

from rootfree_lab.config.reading import ConfigError, Table, read_toml, unknown_name
from rootfree_lab.search.ranges import Choice, Plain, Range, parse

#: Name of a setting -> what it may be. `companion_options.lr` is a setting inside a table.
Space = dict[str, Range | Choice]
Settings = dict[str, Plain]

FIXED = "fixed"


@lru_cache(maxsize=1)
def shipped() -> dict[str, Space]:
    """The wide spaces that come with the laboratory, by the optimizer's name."""
    with as_file(files("rootfree_lab.search") / "spaces.toml") as path:
        tables = read_toml(path)
    return {
        name: {key: parse(f"{name}.{key}", given) for key, given in table.items()}
        for name, table in tables.items()
    }


def default_space(optimizer: str) -> Space:
    """The shipped space of an optimizer, or of its name without a suffix; empty for others."""
    return shipped().get(optimizer, shipped().get(optimizer.partition("-")[0], {}))


def space_of(optimizer: str, override: Mapping[str, Any], where: str) -> Space:
    """The shipped space of an optimizer with the config's overrides.

    A range replaces that of the same setting or adds one; "fixed" takes a setting out.
    """
    space = dict(default_space(optimizer))
    for name, given in _flat(override).items():
        if given != FIXED:
            space[name] = parse(f"{where}.{name}", given)
        elif name in space:
            del space[name]
        else:
            raise unknown_name(f"{where}: the searched setting", name, space)
    if not space:
        raise ConfigError(f"{where} has no setting to search over: give at least one a range")
    return space


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"companion_options": {"lr": [..]}}` as `{"companion_options.lr": [..]}`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        leaf = not isinstance(value, Mapping) or {"low", "high", "scale", "choices"} & set(value)
        flat.update({prefix + key: value} if leaf else _flat(value, f"{prefix}{key}."))
    return flat


def propose(space: Space, key: str, number: int, *, block: int = 1) -> Settings:
    """The settings of the trial of this number: the same ones for a key on every machine.

    In a block of trials each part of a range is drawn from once: with `block` = 6, the six sixths
    of a range in a random order. Every trial alone is uniform. Each setting has generators of its
    own, so another setting in the space changes no draw.
    """
    which, place = divmod(number, block)
    settings: Settings = {}
    for name, allowed in space.items():
        # `random` gives the same numbers in every version of Python, `shuffle` need not.
        parts = sorted(range(block), key=partial(_rank, f"{key}/{which}/{name}"))
        settings[name] = allowed.at((parts[place] + _uniform(f"{key}/{number}/{name}")) / block)
    return settings


def _rank(key: str, part: int) -> float:
    return _uniform(f"{key}/{part}")


def _uniform(key: str) -> float:
    return random.Random(key).random()


def narrowed(space: Space, best: Settings, share: float) -> Space:
    """The space around the best settings."""
    return {name: allowed.narrowed(best[name], share) for name, allowed in space.items()}  # type: ignore[arg-type]


def as_table(space: Space) -> Table:
    """A space as TOML has it."""
    return {name: allowed.as_table() for name, allowed in space.items()}


def with_settings(optimizer: Table, settings: Settings) -> Table:
    """An optimizer's table with these settings in it; the table given stays as it is."""
    result = dict(optimizer)
    for name, value in settings.items():
        head, dot, rest = name.partition(".")
        if dot:
            inner = result.get(head, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"the setting {name!r} is inside {head!r}, which is {inner!r}")
            result[head] = with_settings(inner, {rest: value})
        else:
            result[head] = value
    return result
