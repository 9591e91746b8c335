"""The table of runs: every run with its results and settings, to sort, to filter, to open."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootfree_lab.report.bars import milliseconds
from rootfree_lab.report.configuration import in_words, optimizer_settings
from rootfree_lab.report.records import Run
from rootfree_lab.report.tables import DASH

Value = str | float
COLUMNS = (  # key (also that of the address `#sort=key`), heading, whether it is always shown
    ("label", "Label", True),
    ("data", "Data", False),
    ("model", "Model", False),
    ("optimizer", "Optimizer", False),
    ("seed", "Seed", True),
    ("status", "Status", True),
    ("test_error", "Test error, %", True),
    ("test_loss", "Test loss", True),
    ("train_loss", "Training loss", True),
    ("settings", "Optimizer’s settings", True),
    ("steps", "Steps", False),
    ("time", "Time, s", True),
    ("optimizer_ms", "Optimizer step, ms", True),
    ("memory", "Peak memory, MiB", True),
)
NUMBERS = {"seed", "test_error", "test_loss", "train_loss", "steps", "time",
           "optimizer_ms", "memory"}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A value as it is shown, and by what it sorts (None: it stays last)."""

    key: str
    text: str
    sort: str | None


@dataclass(frozen=True)
class Row:
    """One run; `full` is all that is on record of it but the curve."""

    entries: Sequence[Entry]
    seed: str
    full: str


@dataclass(frozen=True)
class RunsTable:
    """Headings (key, text, whether a number) and rows."""

    heads: Sequence[tuple[str, str, bool]]
    rows: Sequence[Row]


def runs_table(runs: Sequence[Run], repeated: set[str]) -> RunsTable:
    """A row a run. What is the same in all of them is left to the setup of the experiment."""
    values = [_values(run, repeated) for run in runs]
    varying = {key for key in values[0] if len({str(row[key]) for row in values}) > 1}
    if all(row["optimizer"] == row["label"] for row in values):
        varying.discard("optimizer")
    shown = [(key, heading) for key, heading, always in COLUMNS if always or key in varying]
    rows = [
        Row([_entry(key, row[key]) for key, _ in shown], run.seed or DASH, _full(run))
        for run, row in zip(runs, values, strict=True)
    ]
    return RunsTable([(key, heading, key in NUMBERS) for key, heading in shown], rows)


def _values(run: Run, repeated: set[str]) -> dict[str, Value]:
    return {
        "label": run.label,
        "data": run.data,
        "model": run.model,
        "optimizer": run.optimizer,
        "seed": run.seed,
        "status": "repeated" if run.source in repeated else run.status,
        "test_error": 100 * run.final["test_error"],
        "test_loss": run.final["test_loss"],
        "train_loss": run.final["train_loss"],
        "settings": in_words(optimizer_settings(run)),
        "steps": run.steps,
        "time": run.seconds.get("total", math.nan),
        "optimizer_ms": milliseconds(run, "optimizer"),
        "memory": run.memory.get("peak_bytes", math.nan) / 2**20,
    }


def _entry(key: str, value: Value) -> Entry:
    if key not in NUMBERS:
        return Entry(key, str(value), str(value))
    number = _float(value)
    # A diverged value is larger than any number.
    sort = None if math.isnan(number) else "Infinity" if math.isinf(number) else repr(number)
    return Entry(key, value if isinstance(value, str) else _number(number), sort)


def _full(run: Run) -> str:
    full = {
        "record": run.source,
        **({"failure": run.failure} if run.failure else {}),
        "config": run.config,
        "versions": run.versions,
        "seconds": _finite(run.seconds),
        "memory": _finite(run.memory),
    }
    return json.dumps(full, indent=2, ensure_ascii=False, default=str)


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _number(value: float) -> str:
    if math.isnan(value):
        return DASH
    if math.isinf(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def _finite(table: Mapping[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in table.items()}
