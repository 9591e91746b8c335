"""How much the settings of an optimizer matter: one of them changed at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rootfree_lab.bench.first_try.entrants import PEERS, REFERENCES, Entrant, build
from rootfree_lab.bench.first_try.records import Record
from rootfree_lab.bench.first_try.table import REFERENCE, Cells, cells, tasks_of, text
from rootfree_lab.bench.first_try.verdict import Bar
from rootfree_lab.bench.markdown import rows
from rootfree_lab.bench.table import NOTHING
from rootfree_lab.config.reading import ConfigError

#: Whose settings are changed unless others are named.
OPTIMIZERS = (REFERENCE, "Muon", "IFShampoo", "IFWhitening")
#: A change of any setting but the learning rate may move the final loss by less than this share.
ALLOWED = 0.03


@dataclass(frozen=True)
class Change:
    """Another value of one option."""

    option: str
    word: str  # what is done to the value
    factor: float | None = None  # that it is multiplied by
    value: int | None = None  # that replaces it

    @property
    def name(self) -> str:
        return f"`{self.option}` {self.word}"

    def of(self, default: Any) -> Any:
        """The value in the place of the default."""
        if self.factor is None:
            return self.value
        return float(f"{default * self.factor:.3g}")


CHANGES = (
    Change("lr", "÷ 2", 1 / 2), Change("lr", "× 2", 2),
    Change("precond_lr", "÷ 3", 1 / 3), Change("precond_lr", "× 3", 3),
    Change("damping", "÷ 10", 1 / 10), Change("damping", "× 10", 10),
    Change("update_every", "= 1", value=1), Change("update_every", "= 10", value=10),
)  # fmt: skip


def with_changes(field: Iterable[Entrant]) -> list[Entrant]:
    """Every entrant as it is, and with each change of an option that it has and that it accepts."""
    return [
        each
        for entrant in field
        for each in (entrant, *(_changed(entrant, change) for change in CHANGES))
        if each is entrant or (each is not None and _is_accepted(each))
    ]


def _changed(entrant: Entrant, change: Change) -> Entrant | None:
    """The entrant with one option changed; None: it does not have that option."""
    options = entrant.effective()
    if change.option not in options:
        return None
    value = change.of(options[change.option])
    return replace(entrant, given={**entrant.given, change.option: value})


def _is_accepted(entrant: Entrant) -> bool:
    try:
        build(entrant, nn.Linear(2, 2), batch_size=1)
    except (ConfigError, ValueError):  # out of range
        return False
    return True


def as_markdown(records: Sequence[Record], field: Sequence[Entrant]) -> str:
    """A table of changes in percent, a column an optimizer and a task, and which bars are met."""
    found = cells(records)
    tried = [(entrant, task) for task in tasks_of(found) for entrant in field]
    tried = [(entrant, task) for entrant, task in tried if (entrant.label, task) in found]
    head = ("changed", *(f"{task}: {entrant.label}" for entrant, task in tried))
    body = [["nothing: loss", *(text(found, entrant.label, task) for entrant, task in tried)]]
    for change in CHANGES:
        moves = [_move(found, entrant, task, change) for entrant, task in tried]
        if any(move is not None for move in moves):
            body.append([change.name, *map(_percent, moves)])
    said = [
        f"- `{bar.label}`, {bar.demand}: **{bar.verdict}**; {bar.found}"
        for bar in bars(found, field)
    ]
    return "\n".join([*rows(head, body), "", *said])


def bars(found: Cells, field: Sequence[Entrant]) -> list[Bar]:
    """For each optimizer of the library: other settings, and the learning rate beside AdamW's."""
    reference = next((entrant for entrant in field if entrant.name == REFERENCE), None)
    made = []
    for entrant in field:
        if entrant.name in REFERENCES or entrant.name in PEERS:
            continue
        tasks = [task for task in tasks_of(found) if (entrant.label, task) in found]
        others = _moves(found, entrant, tasks, rates=False)
        made.append(_bar(entrant, f"other settings by less than {ALLOWED:.0%}", others, ALLOWED))
        if reference is not None:
            made += [
                _bar(entrant, f"lr on {task} by no more than {REFERENCE}'s", own, most + 1e-12)
                for task in tasks
                if (own := _moves(found, entrant, [task], rates=True))
                and (most := max(_sizes(_moves(found, reference, [task], rates=True)), default=0))
            ]
    return made


Moves = dict[str, float]  # what was changed, and by which share the loss moved


def _moves(found: Cells, entrant: Entrant, tasks: Sequence[str], *, rates: bool) -> Moves:
    moves = {
        f"{change.name} on {task}": _move(found, entrant, task, change)
        for task in tasks
        for change in CHANGES
        if (change.option == "lr") == rates
    }
    return {name: move for name, move in moves.items() if move is not None}


def _sizes(moves: Moves) -> list[float]:
    return [abs(move) for move in moves.values()]


def _bar(entrant: Entrant, demand: str, moves: Moves, below: float) -> Bar:
    over = {name: move for name, move in moves.items() if not abs(move) < below}
    largest = max(_sizes(moves), default=0.0)
    told = ", ".join(f"{name} {_percent(move)}" for name, move in over.items())
    met = not over if moves else None
    return Bar("s", entrant.label, demand, met, len(moves), told or f"at most {largest:.1%}")


def _move(found: Cells, entrant: Entrant, task: str, change: Change) -> float | None:
    """By which share of the loss without it a change moves the loss."""
    other = _changed(entrant, change)
    plain = found.get((entrant.label, task))
    changed = None if other is None else found.get((other.label, task))
    if plain is None or changed is None or not 0 < plain.mean < math.inf:
        return None
    return changed.mean / plain.mean - 1


def _percent(move: float | None) -> str:
    return NOTHING if move is None else f"{move:+.1%}"
