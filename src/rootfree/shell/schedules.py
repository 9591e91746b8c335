"""When the preconditioner is refreshed: at every T-th step, or by a schedule."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rootfree.shell.checks import positive_integer

_ALLOWED = (
    "a positive integer T, 'warm:<T>' (every step of the first 10 T, then every T-th), "
    "'logarithmic' or 'logarithmic:<T>' (every step at first, then ever more rarely, at most every "
    "T-th), or 'module:function' with a function of the step count that returns whether to refresh"
)
_WARM = 10  # times T


def warm(T: int) -> Callable[[int], bool]:
    """Every step of the first 10 T, then every T-th.

    Factors start as multiples of I. With few refreshes at first they contain little of the
    curvature for the first hundred steps, and a short training does not catch up.
    """
    return lambda step: step < _WARM * T or step % T == 0


def logarithmic(T: int | None = None) -> Callable[[int], bool]:
    """Every ⌊log₄ step⌋ steps, at most every T-th: the curvature changes fast at first.

    >>> [step for step in range(80) if logarithmic()(step)][-8:]
    [58, 60, 62, 66, 69, 72, 75, 78]
    """

    def due(step: int) -> bool:
        interval = max(1, int(math.log(step, 4) + 1e-9)) if step > 0 else 1
        return step % (min(interval, T) if T else interval) == 0

    return due


@lru_cache(maxsize=64)
def schedule(update_every: int | str) -> Callable[[int], bool]:
    """The function of the step that an `update_every` stands for."""
    if isinstance(update_every, int):
        return lambda step: step % update_every == 0
    name, _, argument = update_every.partition(":")
    if name == "warm":
        return warm(positive_integer("T", int(argument)))
    if name == "logarithmic":
        return logarithmic(positive_integer("T", int(argument)) if argument else None)
    function = getattr(importlib.import_module(name), argument)
    return lambda step: bool(function(step))


@lru_cache(maxsize=64)
def steps_between(update_every: int | str) -> int:
    """T, how many steps a refresh stands for; 1 if the schedule has no single number."""
    if isinstance(update_every, int):
        return update_every
    name, _, argument = update_every.partition(":")
    return int(argument) if name == "warm" else 1


def refresh_interval(name: str, value: Any) -> int | str:
    """The check of `update_every`: a plain value, so that groups stay plain."""
    if not isinstance(value, str):
        try:
            return positive_integer(name, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} must be {_ALLOWED}; got {value!r}") from None
    try:
        due = schedule(value)
        due(0)
    except Exception as error:
        raise ValueError(f"{name} must be {_ALLOWED}; got {value!r} ({error})") from error
    return value
