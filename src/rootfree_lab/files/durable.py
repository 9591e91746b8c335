"""Files that a kill, a full disk or a power cut leaves as they were, or as they shall be, whole."""

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
    """Turn what the system refuses into `NotWritten`; a lock that another process has is not it."""
    try:
        yield
    except (NotWritten, TimeoutError):
        raise
    except OSError as error:
        raise NotWritten(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def replace_file(path: Path, write: Callable[[Any], None]) -> None:
    """Write beside, flush to the disk, then rename: the rename is the moment it changes.

    `write` is given the open file. Raises `NotWritten` where the system refuses any of it. A link,
    such as /dev/stdout, is followed and what it leads to written as it is; a pipe is, too.
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
                    # torch.save answers a failing write with an error of its own on top.
                    raise target.error or error from None
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):  # the reason for removing it is the one to be told
                beside.unlink(missing_ok=True)
            raise
        sync(path.parent)


def replace_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """The same for UTF-8 text, with line ends as they are."""
    replace_file(path, lambda file: file.write(text.encode("utf-8", errors)))


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, last through a power cut, where the system can."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Remove what killed writers left beside a file; nobody else may be writing it."""
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
