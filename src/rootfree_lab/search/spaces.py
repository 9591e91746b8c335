"""Spaces: the settings that a search varies for an optimizer, shipped or from the config.

A setting may be a range of numbers on some scale, or one of a few values.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import as_file, files
from typing import Any

from rootfree_lab.config.reading import ConfigError, Table, assign, read_toml, unknown_name

SCALES = ("log", "linear", "complement")
_DIGITS = 4  # of a proposed value: what a person would write down
Plain = float | int | str | bool


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, uniform on the scale.

    "log": in log x; "linear": in x; "complement": in log(1 - x), for momentum.
    """

    low: float
    high: float
    scale: str = "log"

    def at(self, fraction: float) -> float:
        """The value at a fraction of the way, in few digits."""
        a, b = self._to(self.low), self._to(self.high)
        return self._inside(self._rounded(self._from(a + fraction * (b - a))))

    def narrowed(self, best: float, share: float) -> Range:
        """The part around `best` that is `share` of this range on its scale; inside it."""
        a, b = self._to(self.low), self._to(self.high)
        centre = self._to(self._inside(best))
        half = share * (b - a) / 2  # negative where the scale runs downwards
        first, last = sorted((a + half, b - half))
        middle = min(max(centre, first), last)  # moved inwards where it would stick out
        low, high = self._from(middle - half), self._from(middle + half)
        if self._rounded(low) < self._rounded(high):
            low, high = self._rounded(low), self._rounded(high)
        return Range(self._inside(min(low, best)), self._inside(max(high, best)), self.scale)

    def as_table(self) -> Any:
        if self.scale == "log":
            return [self.low, self.high]
        return {"low": self.low, "high": self.high, "scale": self.scale}

    def ends(self) -> tuple[Plain, ...]:
        return (self.low, self.high)

    def _to(self, x: float) -> float:
        if self.scale == "linear":
            return x
        return math.log(x if self.scale == "log" else 1 - x)

    def _from(self, y: float) -> float:
        if self.scale == "linear":
            return y
        return math.exp(y) if self.scale == "log" else 1 - math.exp(y)

    def _rounded(self, x: float) -> float:
        if self.scale == "complement":
            return round(1 - float(f"{1 - x:.{_DIGITS}g}"), 15)
        return float(f"{x:.{_DIGITS}g}")

    def _inside(self, x: float) -> float:
        return min(max(x, self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """One of a few values, each as likely."""

    values: tuple[Plain, ...]

    def at(self, fraction: float) -> Plain:
        """The value at a fraction of the way."""
        return self.values[min(int(fraction * len(self.values)), len(self.values) - 1)]

    def narrowed(self, best: Plain, share: float) -> Choice:
        """The best value alone."""
        return Choice((best,))

    def as_table(self) -> Any:
        return {"choices": list(self.values)}

    def ends(self) -> tuple[Plain, ...]:
        return self.values


def parse(where: str, given: Any) -> Range | Choice:
    """`[low, high]`, a table with low, high and scale, or a table with choices."""
    if isinstance(given, Mapping) and "choices" in given:
        return _choice(where, given)
    if isinstance(given, (list, tuple)) and len(given) == 2:
        given = {"low": given[0], "high": given[1]}
    if not isinstance(given, Mapping) or not {"low", "high"} <= set(given):
        raise ConfigError(
            f"{where} must be [low, high], a table with low and high, a table with choices, or "
            f'"fixed"; got {given!r}'
        )
    for key in given:
        if key not in ("low", "high", "scale"):
            raise unknown_name(f"{where}: the key", key, ("low", "high", "scale"))
    for key in ("low", "high"):
        if not _is_number(given[key]):
            raise ConfigError(f"{where}: {key} must be a number, got {given[key]!r}")
    scale = given.get("scale", "log")
    if scale not in SCALES:
        raise unknown_name(f"{where}: the scale", str(scale), SCALES)
    low, high = float(given["low"]), float(given["high"])
    if not low < high:
        raise ConfigError(f"{where} must have low < high, got low {low:g} and high {high:g}")
    if scale == "log" and low <= 0:
        raise ConfigError(f'{where}: low must be positive on the scale "log", got {low:g}')
    if scale == "complement" and high >= 1:
        raise ConfigError(f'{where}: high must be below 1 on the scale "complement", got {high:g}')
    return Range(low, high, scale)


def _choice(where: str, given: Mapping[str, Any]) -> Choice:
    values = given["choices"]
    if len(given) > 1 or not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: choices must be a list with values, got {dict(given)!r}")
    for value in values:
        if not isinstance(value, (bool, int, float, str)):
            raise ConfigError(
                f"{where}: a choice must be a number, a string or a boolean: {value!r}"
            )
    if len(set(map(repr, values))) < len(values):
        raise ConfigError(f"{where}: choices must differ, got {values!r}")
    return Choice(tuple(values))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


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
        ranks = [_uniform(f"{key}/{which}/{name}/{part}") for part in range(block)]
        part = sorted(range(block), key=ranks.__getitem__)[place]
        settings[name] = allowed.at((part + _uniform(f"{key}/{number}/{name}")) / block)
    return settings


def _uniform(key: str) -> float:
    return random.Random(key).random()


def as_table(space: Space) -> Table:
    """A space as TOML has it."""
    return {name: allowed.as_table() for name, allowed in space.items()}


def with_settings(optimizer: Table, settings: Settings) -> Table:
    """An optimizer's table with these settings in it; the table given stays as it is."""
    result = deepcopy(dict(optimizer))
    for name, value in settings.items():
        assign(result, name.split("."), value, f"the setting {name!r}")
    return result
