"""The table of runs: every run with its key settings, to sort, to filter, to open."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rootfree_lab.report.bars import milliseconds
from rootfree_lab.report.markup import Markup, join, tag
from rootfree_lab.report.records import Run
from rootfree_lab.report.tables import DASH

COLUMNS = (  # key (also that of the address `#sort=key`), heading, whether it is a number
    ("label", "Label", False),
    ("data", "Data", False),
    ("model", "Model", False),
    ("optimizer", "Optimizer", False),
    ("seed", "Seed", True),
    ("status", "Status", False),
    ("test_error", "Test error, %", True),
    ("test_loss", "Test loss", True),
    ("train_loss", "Training loss", True),
    ("lr", "lr", True),
    ("batch_size", "Batch", True),
    ("epochs", "Epochs", True),
    ("steps", "Steps", True),
    ("time", "Time, s", True),
    ("optimizer_ms", "Optimizer step, ms", True),
    ("memory", "Peak memory, MiB", True),
)


def runs_table(runs: Sequence[Run], repeated: set[str]) -> Markup:
    """One body of the table a run: its row, and the row with its config that a button opens."""
    heads = [
        tag(
            "th",
            tag("button", heading, type="button"),
            scope="col",
            data_key=key,
            class_="number" if number else None,
        )
        for key, heading, number in COLUMNS
    ]
    heads.append(tag("th", tag("span", "Config", class_="unseen"), scope="col"))
    bodies = [_body(number, run, repeated) for number, run in enumerate(runs)]
    return tag("table", tag("thead", tag("tr", *heads)), *bodies, id="runs-table", class_="runs")


def _body(number: int, run: Run, repeated: set[str]) -> Markup:
    status = "repeated" if run.source in repeated else run.status
    texts: dict[str, str] = {
        "label": run.label,
        "data": run.data,
        "model": run.model,
        "optimizer": run.optimizer,
        "seed": run.seed,
        "status": status,
    }
    train = run.config.get("train")
    optimizer = run.config.get("optimizer")
    lr, batch_size, epochs = (
        _setting(optimizer, "lr"), _setting(train, "batch_size"), _setting(train, "epochs")
    )  # fmt: skip
    numbers = {
        "seed": _float(run.seed),
        "test_error": 100 * run.final["test_error"],
        "test_loss": run.final["test_loss"],
        "train_loss": run.final["train_loss"],
        "lr": lr,
        "batch_size": batch_size,
        "epochs": epochs,
        "steps": run.steps,
        "time": run.seconds.get("total", math.nan),
        "optimizer_ms": milliseconds(run, "optimizer"),
        "memory": run.memory.get("peak_bytes", math.nan) / 2**20,
    }
    cells = [
        tag(
            "td",
            _status(status) if key == "status" else texts.get(key) or _number(numbers.get(key)),
            class_="number" if is_number else None,
            data_value=_sortable(numbers[key]) if is_number else texts[key],
        )
        for key, _, is_number in COLUMNS
    ]
    where = f"config-{number}"
    button = tag(
        "button",
        "Config",
        tag("span", f" of {run.label}, seed {run.seed or DASH}", class_="unseen"),
        type="button",
        class_="open",
        aria_expanded="false",
        aria_controls=where,
    )
    full = {
        "record": run.source,
        **({"failure": run.failure} if run.failure else {}),
        "config": run.config,
        "versions": run.versions,
        "seconds": _finite(run.seconds),
        "memory": _finite(run.memory),
    }
    written = json.dumps(full, indent=2, ensure_ascii=False, default=str)
    return tag(
        "tbody",
        tag("tr", *cells, tag("td", button)),
        tag(
            "tr",
            tag("td", tag("pre", written), colspan=str(len(COLUMNS) + 1)),
            id=where,
            hidden=True,
        ),
    )


def _status(status: str) -> Markup:
    return tag("span", status, class_=f"status {status}")


def _setting(section: Any, key: str) -> float:
    return _float(section.get(key)) if isinstance(section, Mapping) else math.nan


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def _sortable(value: float) -> str | None:
    """Missing values have none and stay last; a diverged one is larger than any number."""
    return None if math.isnan(value) else "Infinity" if math.isinf(value) else repr(value)


def _finite(table: Mapping[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in table.items()}


def controls(count: int) -> Markup:
    """The filter above the table, and how many runs it leaves."""
    box = tag(
        "input", id="filter", type="search", placeholder="words, such as adamw diverged",
        autocomplete="off", spellcheck="false", aria_controls="runs-table",
    )  # fmt: skip
    shown = tag("output", f"{count} of {count} runs", id="shown", for_="filter")
    return tag("p", tag("label", "Filter ", box), join([" ", shown]), class_="controls")
