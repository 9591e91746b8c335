"""Records as CSV: a row a run, or a row a point of a run's curve."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

from rootfree_lab.files.durable import replace_text
from rootfree_lab.report.experiments import settings
from rootfree_lab.report.records import AXES, METRICS, Run, read

Row = dict[str, Any]


def export(records: Path, target: Path, *, curves: bool) -> tuple[int, list[str]]:
    """Write the records of a file or a folder; how many rows, and what had to be left out."""
    runs, problems = read(records)
    rows = [row for run in runs for row in (points(run) if curves else [of_run(run)])]
    replace_text(target, as_csv(rows), errors="replace")
    return len(rows), problems


def as_csv(rows: Iterable[Row]) -> str:
    """All columns of all rows: a run without a setting has an empty cell."""
    rows = list(rows)
    text = StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def of_run(run: Run) -> Row:
    """What is known of a run as one row, its settings last."""
    return {
        **_names(run),
        "status": run.status,
        "failure": run.failure.get("message", ""),
        **{metric: _cell(run.final[metric]) for metric in METRICS},
        "steps": _cell(run.steps),
        **{f"seconds.{key}": _cell(value) for key, value in run.seconds.items()},
        **{f"memory.{key}": _cell(value) for key, value in run.memory.items()},
        **{f"versions.{key}": value for key, value in run.versions.items()},
        **{key: value.strip('"') for key, value in settings(run).items()},
    }


def points(run: Run) -> Iterable[Row]:
    """The curve of a run, a row a point."""
    columns = (*AXES, *METRICS)
    for values in zip(*(run.curve[key] for key in columns), strict=True):
        yield {**_names(run), **dict(zip(columns, map(_cell, values), strict=True))}


def _names(run: Run) -> Row:
    return {
        "data": run.data,
        "model": run.model,
        "label": run.label,
        "optimizer": run.optimizer,
        "seed": run.seed,
    }


def _cell(value: float) -> str:
    """Every digit; nothing where there is no number, inf where there was one no more."""
    if math.isnan(value):
        return ""
    return repr(int(value)) if float(value).is_integer() else repr(float(value))
