"""Unpacks files to at most a multiple of their size, so that a small file cannot fill a disk.

The data sets of this package are compressed by factors of two to thirty.
"""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO

_FACTOR, _LEAST = 100, 1 << 20
_BLOCK = 1 << 20


class Allowance:
    """How many bytes may still come out of a file."""

    def __init__(self, path: Path) -> None:
        self._total = self._left = _FACTOR * path.stat().st_size + _LEAST

    def take(self, count: int) -> None:
        """Count bytes; too many are an error."""
        self._left -= count
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {self._total:,} bytes")

    def blocks(self, file: IO[bytes] | gzip.GzipFile) -> Iterable[bytes]:
        """The content of an open file in blocks, each counted."""
        while block := file.read(_BLOCK):
            self.take(len(block))
            yield block


class Counted(gzip.GzipFile):
    """A gzipped file that counts all that is read of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._allowance = Allowance(path)

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        self._allowance.take(len(block))
        return block


def gunzip(path: Path) -> bytes:
    """The content of a gzipped file."""
    with gzip.open(path, "rb") as file:
        return b"".join(Allowance(path).blocks(file))


def unpack_tar(archive: Path, keep: tuple[str, ...], target: Path) -> None:
    """Put the files of a gzipped tar archive whose paths match into the folder `target`."""
    # Headers count too, because tarfile reads them into memory however long they are. What is
    # written counts again, because the holes of a sparse file take no space in the archive.
    allowance = Allowance(archive)
    with Counted(archive) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            kept = member.isfile() and matches(member.name, keep)
            content = tar.extractfile(member) if kept else None
            if content is not None:
                _write(allowance.blocks(content), member.name, target)


def unpack_zip(archive: Path, keep: tuple[str, ...], target: Path) -> None:
    """Put the files of a zip archive whose paths match into the folder `target`."""
    allowance = Allowance(archive)
    with zipfile.ZipFile(archive) as files:
        for member in files.infolist():
            if not member.is_dir() and matches(member.filename, keep):
                with files.open(member) as content:
                    _write(allowance.blocks(content), member.filename, target)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns is that of a path."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def _write(blocks: Iterable[bytes], name: str, target: Path) -> None:
    # The last part of the name only: no archive writes outside the target.
    with (target / PurePosixPath(name).name).open("wb") as file:
        file.writelines(blocks)


def check_zip(path: Path) -> None:
    """Refuse an archive with members of too large a size; reading checks that they have it."""
    with zipfile.ZipFile(path) as files:
        Allowance(path).take(sum(member.file_size for member in files.infolist()))
