"""Contenders that take turns; an error of one does not affect the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from rootfree_lab.bench.contenders import Contender, NotApplicableError
from rootfree_lab.bench.memory import release
from rootfree_lab.bench.record import IterationRow, StepRow
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.training.watching.measures import is_out_of_memory

OUT_OF_MEMORY = "out of memory"
_FEWEST_TURNS = 2

Say = Callable[[str], None]
Entry = TypeVar("Entry")
Row = TypeVar("Row", StepRow, IterationRow)


@dataclass(frozen=True)
class Turns(Generic[Entry, Row]):
    """Functions that build a contender, take its turn of a number, and make its row."""

    kind: type[Row]
    enter: Callable[[Contender], Entry]
    turn: Callable[[Entry, int], object]
    row: Callable[[Contender, Entry], Row]
    device: torch.device
    turns: int
    seconds: float  # a contender stops after this many, but not before two turns
    say: Say

    def rows(self, contenders: Sequence[Contender]) -> dict[str, Row]:
        """A row for each: its figures with the ratio to the first, or why there are none."""
        rows: dict[str, Row] = {}
        there: dict[str, Entry] = {}
        for contender in contenders:
            self.say(contender.name)
            try:
                there[contender.name] = self.enter(contender)
            except Exception as error:
                rows[contender.name] = self._failed(contender, error)
                release(self.device)
        spent = dict.fromkeys(there, 0.0)
        self.say("taking turns")
        for number in range(self.turns + 1):
            for contender in (each for each in contenders if each.name not in rows):
                entry = there[contender.name]
                try:
                    if number == self.turns:
                        rows[contender.name] = self.row(contender, entry)
                    elif number < _FEWEST_TURNS or spent[contender.name] <= self.seconds:
                        start = time.perf_counter()
                        self.turn(entry, number)
                        spent[contender.name] += time.perf_counter() - start
                except Exception as error:
                    rows[contender.name] = self._failed(contender, error)
        first = rows[contenders[0].name].ms
        return {
            name: replace(row, ratio=row.ms.median / first.median) if row.ms and first else row
            for name, row in rows.items()
        }

    def _failed(self, contender: Contender, error: Exception) -> Row:
        reason = why(error)
        return self.kind(contender.name, contender.family, contender.period, failure=reason)


def why(error: Exception) -> str:
    """One line."""
    if isinstance(error, NotApplicableError | ConfigError):
        return str(error)
    if is_out_of_memory(error) or "not enough memory" in str(error):
        return OUT_OF_MEMORY
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]
