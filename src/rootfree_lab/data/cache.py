"""The cache: one folder per entry with the checksums of its files; an entry is complete or absent.

An entry is prepared under a temporary name in the cache, flushed to the disk and then renamed. So a
crash leaves nothing under the entry's name. A lock lets one process prepare an entry while others
wait for it; the system releases the lock when a process dies.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rootfree_lab.data.errors import DataError, reading
from rootfree_lab.files.durable import sync

CHECKSUMS = "SHA256SUMS"
_TEMPORARY = ".temporary-"
_ABANDONED_S = 24 * 3600  # what a killed process left is removed after a day


def cache_folder(cache: Path | None = None) -> Path:
    """The argument, or `ROOTFREE_CACHE`, or `rootfree` in the platform's folder for caches."""
    if cache is not None:
        return Path(cache).expanduser()
    if named := os.environ.get("ROOTFREE_CACHE"):
        return Path(named).expanduser()
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "rootfree"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "rootfree"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rootfree"
    return Path.home() / ".cache" / "rootfree"


def is_cached(cache: Path, entry: str) -> bool:
    """Whether an entry is there; `verify` says whether it is whole."""
    return (cache / entry / CHECKSUMS).is_file()


def verify(folder: Path) -> None:
    """Compare every file of an entry with its checksum."""
    listing = folder / CHECKSUMS
    with reading(listing):
        lines = listing.read_text(encoding="utf-8").splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    if not expected:
        raise DataError(f"{listing} is truncated or altered: it lists no files.")
    for name, digest in expected.items():
        with reading(folder / name):
            found = checksum(folder / name)
        if found != digest:
            raise DataError(f"{folder / name} is truncated or altered: its checksum differs.")


@contextmanager
def locked(cache: Path, entry: str) -> Iterator[None]:
    """Be the only process that prepares an entry."""
    from filelock import FileLock

    with ExitStack() as held:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(cache / f".{entry}.lock"))
        except OSError as error:
            raise DataError(f"cache must be a folder that can be written, got {cache}.") from error
        yield


@contextmanager
def temporary_folder(cache: Path) -> Iterator[Path]:
    """A folder in the cache that is gone afterwards, on the file system where entries live."""
    _remove_abandoned(cache)
    with TemporaryDirectory(prefix=_TEMPORARY, dir=cache, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def store(prepared: Path, cache: Path, entry: str) -> Path:
    """Make a prepared folder (in the cache) the entry, in one step; needs the entry's lock."""
    files = sorted(path for path in prepared.rglob("*") if path.is_file())
    listing = prepared / CHECKSUMS
    lines = (f"{checksum(path)}  {path.relative_to(prepared).as_posix()}\n" for path in files)
    listing.write_text("".join(lines), encoding="utf-8")
    for path in [*files, listing]:
        sync(path)
    for folder in [*(path for path in prepared.rglob("*") if path.is_dir()), prepared]:
        sync(folder)
    target = cache / entry
    if target.exists():
        # Renamed first, so that an entry is never half removed.
        with temporary_folder(cache) as aside:
            os.replace(target, aside / "damaged")
    os.replace(prepared, target)
    sync(cache)
    return target


def checksum(path: Path, kind: str = "sha256") -> str:
    """A checksum of a file, by its name in hashlib, in hexadecimal digits."""
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _remove_abandoned(cache: Path) -> None:
    for folder in cache.glob(f"{_TEMPORARY}*"):
        try:
            abandoned = time.time() - folder.stat().st_mtime > _ABANDONED_S
        except OSError:
            continue
        if abandoned:
            shutil.rmtree(folder, ignore_errors=True)
