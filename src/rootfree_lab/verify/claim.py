"""What a claim is, and what measuring it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """A figure, the bar it has to clear, and whether it does."""

    figure: float
    bar: str
    passed: bool
    detail: str


Measure = Callable[[torch.Generator], Measured]
Measuring = TypeVar("Measuring", bound=Callable[..., Measured])


@dataclass(frozen=True)
class Claim:
    """A sentence about the methods, and the function that measures whether it is so."""

    name: str
    sentence: str
    measure: Measure


#: Claims by the module whose functions measure them.
REGISTERED: dict[str, list[Claim]] = {}


def claim(name: str, sentence: str, **options: Any) -> Callable[[Measuring], Measuring]:
    """Make a claim of the function that measures it; `options` are further arguments of it."""

    def register(measure: Measuring) -> Measuring:
        claims = REGISTERED.setdefault(measure.__module__, [])
        claims.append(Claim(name, sentence, partial(measure, **options)))
        return measure

    return register


def below(figure: float, limit: float, detail: str) -> Measured:
    """Equality: the figure is a relative difference. One that is not a number does not pass."""
    return Measured(figure, f"< {limit:g}", figure < limit, detail)


def above(figure: float, limit: float, detail: str) -> Measured:
    """A contrast, which has to show, or a lower bound."""
    return Measured(figure, f"> {limit:g}", figure > limit, detail)


def relative_difference(x: Tensor, y: Tensor) -> float:
    """‖x - y‖/‖y‖."""
    return float((x - y).norm() / y.norm())


def largest(differences: Iterable[float]) -> float:
    """The largest one; not a number if any is not (Python's max would pass over it)."""
    return torch.tensor(list(differences), dtype=torch.float64).max().item()
