"""The table of runs: every run with its results and settings, to sort, to filter, to open."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rootfree_lab.files.appending import finite
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


def runs_table(runs: Sequence[Run], repeated: set[str]) -> dict[str, Any]:
    """For the template: heads (key, text, whether a number), and a row for each run.

    What is the same in all runs is left to the setup of the experiment. An entry is a value as it
    is shown, and by what it sorts (None: it stays last); `full` is all that is on record of a run
    but the curve.
    """
    values = [_values(run, repeated) for run in runs]
    varying = {key for key in values[0] if len({str(row[key]) for row in values}) > 1}
    if all(row["optimizer"] == row["label"] for row in values):
        varying.discard("optimizer")
    shown = [(key, heading) for key, heading, always in COLUMNS if always or key in varying]
    rows = [
        {
            "entries": [_entry(key, row[key]) for key, _ in shown],
            "seed": run.seed or DASH,
            "full": _full(run),
        }
        for run, row in zip(runs, values, strict=True)
    ]
    return {"heads": [(key, heading, key in NUMBERS) for key, heading in shown], "rows": rows}


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


def _entry(key: str, value: Value) -> dict[str, str | None]:
    if key not in NUMBERS:
        return {"key": key, "text": str(value), "sort": str(value)}
    number = _float(value)
    # A diverged value is larger than any number.
    sort = None if math.isnan(number) else "Infinity" if math.isinf(number) else repr(number)
    text = value if isinstance(value, str) else _number(number)
    return {"key": key, "text": text, "sort": sort}


def _full(run: Run) -> str:
    full = {
        "record": run.source,
        **({"failure": run.failure} if run.failure else {}),
        "config": run.config,
        "versions": run.versions,
        "seconds": finite(run.seconds),
        "memory": finite(run.memory),
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
