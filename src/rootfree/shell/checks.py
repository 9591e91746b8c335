"""Checks of hyper-parameters.

A check is called with the option's name and value. It returns the value to store (plain Python or
a tensor) or raises an error that names the argument, the value and the allowed range.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real as RealNumber
from typing import Any

from torch import Tensor

Check = Callable[[str, Any], Any]


def _wrong_type(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")


@dataclass(frozen=True)
class Real:
    """A finite real number in an interval; `open_high` excludes the upper end."""

    low: float = 0.0
    high: float = math.inf
    open_high: bool = False

    def __call__(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, RealNumber):
            raise _wrong_type(name, value, "a real number")
        number = float(value)
        below_high = number < self.high if self.open_high else number <= self.high
        if not (math.isfinite(number) and self.low <= number and below_high):
            raise ValueError(f"{name} must be in {self}, got {value!r}")
        return number

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"[{self.low:g}, inf)"
        return f"[{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"


@dataclass(frozen=True)
class Optional:
    """None, or what `check` allows."""

    check: Check

    def __call__(self, name: str, value: Any) -> Any:
        return None if value is None else self.check(name, value)


@dataclass(frozen=True)
class OneOf:
    """One of a few values."""

    allowed: tuple[Any, ...]

    def __call__(self, name: str, value: Any) -> Any:
        if value not in self.allowed:
            listed = ", ".join(repr(each) for each in self.allowed)
            raise ValueError(f"{name} must be one of {listed}; got {value!r}")
        return value


def learning_rate(name: str, value: Any) -> float | Tensor:
    """A number, or a one-element tensor, which graphs and compilers do not treat as a constant."""
    if not isinstance(value, Tensor):
        return Real()(name, value)
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            f"{name} as a tensor must hold one floating-point number, "
            f"got shape {tuple(value.shape)} of {value.dtype}"
        )
    Real()(name, value.item())
    return value


def positive_integer(name: str, value: Any) -> int:
    """A whole number of at least one (NumPy's integers too)."""
    return _integer(name, value, least=1, expected="a positive integer")


def natural_number(name: str, value: Any) -> int:
    """A whole number of at least zero."""
    return _integer(name, value, least=0, expected="an integer of at least 0")


def _integer(name: str, value: Any, *, least: int, expected: str) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise _wrong_type(name, value, expected)
    if number < least:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return number


def boolean(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "True or False")
    return value


def averaging_pair(name: str, value: Any) -> tuple[float, float]:
    """AdamW's `betas`: two numbers in [0, 1)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise _wrong_type(name, value, "a pair of numbers")
    in_range = Real(high=1.0, open_high=True)
    return in_range(f"{name}[0]", value[0]), in_range(f"{name}[1]", value[1])


def positive(name: str, value: Any) -> float:
    """A number above zero."""
    number = Real()(name, value)
    if number == 0:
        raise ValueError(f"{name} must be in (0, inf), got {value!r}")
    return number


def init_scale(name: str, value: Any) -> float | str:
    """A positive number or "gradient"."""
    return value if value == "gradient" else positive(name, value)
