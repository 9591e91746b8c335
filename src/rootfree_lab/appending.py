"""Append to a file of lines: whole or not at all, whoever else is writing or was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock


def append_lines(path: Path, lines: Callable[[], bytes], *, lock: str, timeout: float = -1) -> None:
    """Append what `lines` returns; it is called when nobody else can write.

    The lock is the system's: it ends with the process that has it. Raises `filelock.Timeout` where
    it cannot be had in `timeout` seconds (negative: waits).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock, timeout=timeout):
        text = lines()
        if not text:
            return
        with open(path, "a+b") as file:
            end = _mend_tail(file)
            try:
                file.write(text)
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
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return end
    file.seek(0)
    tail = file.read().rpartition(b"\n")[2]
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        end -= len(tail)
        file.truncate(end)
    else:
        file.write(b"\n")
        end += 1
    return end
