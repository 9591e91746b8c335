"""The records file: one finished run, one line of JSON; many processes may append to it."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import rootfree
from rootfree_lab.config import own_code
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.config.settings import Config
from rootfree_lab.files.appending import TORN, append_lines, finite, read_lines

Record = dict[str, Any]


def append_record(path: Path, record: Record) -> None:
    """Add one line, completely or not at all, also with other writers."""
    line = _line(record)
    append_lines(path, lambda: line, lock=f"{path}.lock")


def append_missing(path: Path, records: Sequence[Record]) -> None:
    """Add the records whose run is not in the file yet, under its label."""

    def key(record: Record) -> tuple[Any, Any]:
        return record.get("label"), record.get("identity")

    def missing() -> bytes:
        known = {key(record) for record in read_records(path)}
        return b"".join(_line(r) for r in records if key(r) not in known)

    append_lines(path, missing, lock=f"{path}.lock")


def _line(record: Record) -> bytes:
    return (json.dumps(finite(record), allow_nan=False) + "\n").encode()


def read_records(path: Path) -> list[Record]:
    """All records of a file; none if it does not exist. An incomplete last line is skipped."""
    if not path.exists():
        return []
    records: list[Record] = []
    for number, content in read_lines(path):
        if not isinstance(content, str):
            records.append(content)
        elif content != TORN:  # being written, or cut off by a kill
            raise ConfigError(f"{path}, line {number}: not a JSON record: {content}")
    return records


def versions(device: torch.device) -> dict[str, str]:
    """The versions and the device of a run."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "rootfree": rootfree.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
    }


def describe(config: Config) -> Record:
    """The part of a record that is known before the run starts."""
    return {
        "label": config.label,
        "config": config.as_table(),
        "identity": config.identity(),
        "seed": config.train.seed,
        "data": own_code.shown(config.data.name),
        "model": own_code.shown(config.model.name),
        "optimizer": config.optimizer.name,
    }
