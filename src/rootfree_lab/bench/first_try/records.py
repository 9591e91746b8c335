"""The record of one run, and the file with one record a line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from rootfree_lab.bench.record import RecordError
from rootfree_lab.files.appending import TORN, read_lines
from rootfree_lab.files.records import append_record

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
    late_ratio: float | None = None  # mean of the last 50 steps to the lowest, both at least 1.2e-7
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
    """Add a line, whole or not at all, whoever else is writing."""
    append_record(file, {"format": FORMAT, **asdict(record)})


def read(file: Path) -> list[Record]:
    """The records of a file, in its order; a line that was cut short is left out."""
    names = {each.name for each in fields(Record)}
    records = []
    try:
        lines = [line for line in read_lines(file) if line[1] != TORN]
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error}") from error
    for number, content in lines:
        kind = content if isinstance(content, str) else content.pop("format", None)
        if isinstance(content, str) or kind != FORMAT or set(content) != names:
            raise RecordError(
                f"{file}, line {number} is no record of bench --first-try: its format is {kind!r}"
            )
        try:
            records.append(msgspec.convert(content, Record))
        except msgspec.ValidationError as error:
            raise RecordError(f"{file}, line {number}: {error}") from error
    return records
