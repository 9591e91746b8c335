"""Compressed files, unpacked to at most a multiple of their size: a small file cannot fill a disk.

The data sets here shrink by factors of two to thirty.
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Iterable
from pathlib import Path
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


def gunzip(path: Path) -> bytes:
    """The content of a gzipped file."""
    with gzip.open(path, "rb") as file:
        return b"".join(Allowance(path).blocks(file))


def check_zip(path: Path) -> None:
    """Refuse an archive whose members say that they are too large; reading checks what they say."""
    with zipfile.ZipFile(path) as files:
        Allowance(path).take(sum(member.file_size for member in files.infolist()))
