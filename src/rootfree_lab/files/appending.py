"""Files of JSON lines: appended to whole or not at all, whoever else is writing or was killed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from rootfree_lab.files.durable import in_words, sync


def append_lines(path: Path, lines: Callable[[], bytes], *, lock: str, timeout: float = -1) -> None:
    """Append what `lines` returns; it is called when nobody else can write.

    The lock is the system's: it ends with the process that has it. Raises `filelock.Timeout` where
    it cannot be had in `timeout` seconds (negative: waits).
    """
    with ExitStack() as held:
        with in_words(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(lock, timeout=timeout))
        if text := lines():
            with in_words(path):
                _append(path, text)


TORN = "cut off in the middle"


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The numbers of the lines that are not empty, each with its table, or with what it is instead.

    A writer that was killed leaves a last line without its end, which is `TORN`.
    """
    # Bytes that are not UTF-8 spoil their own line, not the file.
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):  # the latter: nested too deeply
            yield number, TORN if number == len(lines) else "not JSON"
            continue
        yield number, content if isinstance(content, dict) else "not a record (a JSON object)"


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return value


def _append(path: Path, text: bytes) -> None:
    # Without a buffer: what the system refused is not written again when the file is closed.
    with open(path, "a+b", buffering=0) as file:
        end = _mend_tail(file)
        try:
            _write_whole(file, text)
            os.fsync(file.fileno())
            if end == 0:
                sync(path.parent)
        except OSError:  # a full disk: half a line must not stay
            # Where it has to, readers pass over it and the next writer takes it away.
            with suppress(OSError):
                file.truncate(end)
            raise


def _write_whole(file: Any, text: bytes) -> None:
    """Write all of it: the system may take less at a time."""
    left = memoryview(text)
    while left:
        left = left[file.write(left) :]


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
