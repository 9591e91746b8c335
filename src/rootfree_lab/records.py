"""The records file: one finished run, one line of JSON; many processes may append to it."""

from __future__ import annotations

import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

import rootfree

Record = dict[str, Any]


def append_record(path: Path, record: Record) -> None:
    """Add one line, whole or not at all, whoever else is writing."""
    line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"), open(path, "a+b") as file:
        end = _mend_tail(file)
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:  # a full disk: half a line must not stay
            file.truncate(end)
            raise


def _mend_tail(file: Any) -> int:
    """Deal with a last line that has no end: a writer was killed, or an editor left it so."""
    end: int = file.seek(0, os.SEEK_END)
    if end == 0:
        return 0
    file.seek(0)
    tail = file.read().rpartition(b"\n")[2]
    if not tail:
        return end
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        end -= len(tail)
        file.truncate(end)
    else:
        file.write(b"\n")
        end += 1
    return end


def read_records(path: Path) -> list[Record]:
    """All records of a file; none if it is not there. An unfinished last line is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not a table")
        except (ValueError, RecursionError) as error:  # the latter: nested too deeply
            if number == len(lines):  # being written, or cut off by a kill
                continue
            raise ValueError(f"{path}, line {number}: not a JSON record: {error}") from error
        records.append(record)
    return records


def versions(device: torch.device) -> dict[str, str]:
    """What the run was made with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "rootfree": rootfree.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value
