"""The record of one run, and the file with one record a line."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rootfree_lab.bench.record import RecordError

FORMAT = "rootfree first try 1"


@dataclass(frozen=True)
class Record:
    """One run; a number that is not finite is None."""

    task: str
    optimizer: str
    label: str  # the optimizer and the options given
    options: dict[str, Any]  # all of them, the defaults too
    seed: int
    scale: str
    steps: int
    constant: bool  # learning rate, without warm-up and decay
    device: str
    batch_size: int = 0  # B
    curve: list[tuple[int, float | None]] = field(default_factory=list)  # (step, mean loss to it)
    first_loss: float | None = None  # before the first step
    final_loss: float | None = None  # mean of the last 50 steps; of all data for convex tasks
    best_mean: float | None = None  # the lowest mean of 50 steps in a row
    late_ratio: float | None = None  # mean of the last 50 steps to the lowest
    test_loss: float | None = None
    test_error: float | None = None  # a share
    diverged: bool = False
    seconds: float = 0.0
    failure: str | None = None  # of the optimizer's step
    torch: str = ""

    @property
    def key(self) -> str:
        """What makes two runs the same run."""
        parts = (self.task, self.optimizer, self.options, self.seed, self.scale, self.steps)
        return json.dumps([*parts, self.constant, self.device], sort_keys=True)


def append(file: Path, record: Record) -> None:
    """Add a line with one write: a reader sees it whole or not at all."""
    line = json.dumps({"format": FORMAT, **asdict(record)}, allow_nan=False) + "\n"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        # A line that a full disk or a killed machine cut short stays a line of its own.
        cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, (b"\n" if cut else b"") + line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(file: Path) -> list[Record]:
    """The records of a file, in its order; a line that was cut short is left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} cannot be read: {error}") from error
    names = {each.name for each in fields(Record)}
    records = []
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        kind = content.pop("format", None) if isinstance(content, dict) else None
        if kind != FORMAT or set(content) != names:
            raise RecordError(
                f"{file}, line {number} is no record of bench --first-try: its format is {kind!r}"
            )
        content["curve"] = [tuple(point) for point in content["curve"]]
        records.append(Record(**content))
    return records
