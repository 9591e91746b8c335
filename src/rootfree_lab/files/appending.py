"""Files of JSON lines. A line is appended completely or not at all, also with other writers."""

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

    The system releases the lock when a process dies. Raises `filelock.Timeout` if the lock is not
    free within `timeout` seconds (negative: waits for ever).
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
    """The number of each line that is not empty, with its table or what is wrong with it.

    A killed writer leaves an incomplete last line, which is `TORN`.
    """
    # Bytes that are not UTF-8 affect only their own line.
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
    # Without a buffer, which would write again on closing what the system had refused.
    with open(path, "a+b", buffering=0) as file:
        end = _mend_tail(file)
        try:
            _write_whole(file, text)
            os.fsync(file.fileno())
            if end == 0:
                sync(path.parent)
        except OSError:  # a full disk: half a line must not stay
            # If it does stay, readers skip it and the next writer removes it.
            with suppress(OSError):
                file.truncate(end)
            raise


def _write_whole(file: Any, text: bytes) -> None:
    """Write all of the text: a single call may write less."""
    left = memoryview(text)
    while left:
        left = left[file.write(left) :]


def _mend_tail(file: Any) -> int:
    """Repair a last line without its end, left by a killed writer or an editor."""
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
