"""Reads records: one JSON object per line and run, also from damaged files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootfree_lab.files.appending import read_lines

Array = NDArray[np.float64]

AXES = ("step", "epoch", "seconds")
METRICS = ("train_loss", "test_loss", "test_error")


class ReportError(ValueError):
    """Records that no report can be made of."""


@dataclass(frozen=True)
class Run:
    """One record. A number that is missing is nan; one that was nan or infinite is inf."""

    label: str
    data: str
    model: str
    optimizer: str
    seed: str
    completed: bool
    failure: Mapping[str, Any]  # kind and message, where the run told what stopped it
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    curve: Mapping[str, Array]  # AXES and METRICS, all of one length
    final: Mapping[str, float]  # METRICS
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    steps: float
    source: str  # file and line

    @property
    def status(self) -> str:
        """`completed`, `diverged` (its losses stopped being numbers) or `incomplete`."""
        ends = np.concatenate([self.curve[metric][-1:] for metric in METRICS])
        infinite = np.isinf(ends).any() or any(map(math.isinf, self.final.values()))
        if infinite or self.failure.get("kind") == "diverged":
            return "diverged"
        return "completed" if self.completed else "incomplete"


def read(source: Path) -> tuple[list[Run], list[str]]:
    """The runs of a file, or of all `*.jsonl` files below a folder, and what had to be left out.

    Raises:
        ReportError: when there is nothing to read, or no record in what is there.
    """
    if source.is_dir():
        files = sorted(source.rglob("*.jsonl"))
        if not files:
            raise ReportError(f"there is no file *.jsonl in the folder {str(source)!r}")
    elif source.is_file():
        files = [source]
    else:
        raise ReportError(f"there is no file or folder {str(source)!r}")
    runs: list[Run] = []
    problems: list[str] = []
    for file in files:
        name = str(file.relative_to(source)) if source.is_dir() else file.name
        for number, content in read_lines(file):
            place = f"{name}, line {number}"
            if isinstance(content, str):
                problems.append(f"{place}: {content}")
            else:
                runs.append(as_run(content, place))
    if not runs:
        reason = f": {problems[0]}" if problems else ""
        raise ReportError(f"there are no records in {str(source)!r}{reason}")
    return runs, problems


def as_run(content: dict[str, Any], source: str = "") -> Run:
    """The run of a record; missing parts are empty."""
    config = _table(content.get("config"))
    curve = _curve(content.get("curve"))
    final = _table(content.get("final"))

    def name(key: str, default: str) -> str:
        return _text(content.get(key)) or _text(_table(config.get(key)).get("name")) or default

    seed = content.get("seed", _table(config.get("train")).get("seed"))
    return Run(
        label=_text(content.get("label")) or name("optimizer", "(no label)"),
        data=name("data", "(no data)"),
        model=name("model", "(no model)"),
        optimizer=name("optimizer", ""),
        seed=_text(seed),
        completed=content.get("completed") is True,
        failure=_table(content.get("failure")),
        config=config,
        versions=_table(content.get("versions")),
        curve=curve,
        final={metric: _final(final, curve, metric) for metric in METRICS},
        seconds=_numbers(content.get("seconds")),
        memory=_numbers(content.get("memory")),
        steps=_number(content.get("steps")),
        source=source,
    )


def _curve(value: Any) -> dict[str, Array]:
    points = [p for p in value if isinstance(p, dict)] if isinstance(value, list) else []
    curve = {
        key: np.array([_number(point.get(key)) for point in points], dtype=np.float64)
        for key in (*AXES, *METRICS)
    }
    # A run ends where one of its losses is no longer a number. Such a network still has an error
    # that can be counted, but it is that of guessing.
    over = np.logical_or.accumulate(np.any([np.isinf(curve[m]) for m in METRICS], axis=0))
    return curve | {m: np.where(over & ~np.isnan(curve[m]), np.inf, curve[m]) for m in METRICS}


def _final(final: Mapping[str, Any], curve: Mapping[str, Array], metric: str) -> float:
    """The final value; of a run that has none, the last one on its curve."""
    known = curve[metric][~np.isnan(curve[metric])]
    if metric not in final:
        return float(known[-1]) if known.size else math.nan
    # Strict JSON has null for what is not a number: so it is where there were numbers before.
    return math.inf if final[metric] is None and known.size else _number(final[metric])


def _number(value: Any) -> float:
    """A missing number is nan; one that is not finite (a loss that overflowed) is inf."""
    if isinstance(value, str) and value.strip().lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return math.inf  # how writers of strict JSON spell them
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    return number if math.isfinite(number) else math.inf


def _numbers(value: Any) -> dict[str, float]:
    return {str(key): _number(entry) for key, entry in _table(value).items()}


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    """One line of text: a name never breaks a line of a figure or a table."""
    if value is None or isinstance(value, dict | list):
        return ""
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
