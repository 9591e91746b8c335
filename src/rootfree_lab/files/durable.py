"""Writes files so that a kill, a full disk or a power cut leaves the complete old or new file."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class NotWritten(OSError):  # noqa: N818 (an outcome)
    """A file that could not be written; what was there before is kept."""


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Turn errors of the system into `NotWritten`, except a lock that another process holds."""
    try:
        yield
    except (NotWritten, TimeoutError):
        raise
    except OSError as error:
        raise NotWritten(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def replace_file(path: Path, write: Callable[[Any], None]) -> None:
    """Write a file beside, flush it to the disk, then rename it, which is atomic.

    `write` gets the open file. Raises `NotWritten` if the system refuses any step. The target of a
    link, such as /dev/stdout, is written directly, and so is a pipe.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with in_words(path), open(path, "wb") as file:
            write(file)
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with in_words(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(beside, "wb") as file:
                target = _Remembering(file)
                try:
                    write(target)
                except Exception as error:
                    # torch.save replaces the error of a failed write by its own.
                    raise target.error or error from None
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                beside.unlink(missing_ok=True)
            raise
        sync(path.parent)


def replace_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """The same for UTF-8 text, with line ends as they are."""
    replace_file(path, lambda file: file.write(text.encode("utf-8", errors)))


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut, if the system supports that."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Remove leftovers of killed writers beside a file, which nobody else may be writing."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        left.unlink(missing_ok=True)


class _Remembering:
    """A file that remembers why it could not be written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written: int = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
