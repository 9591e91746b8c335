"""The cache: complete or absent, and checked when it is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rootfree_lab.data import DataError, cache


def prepared(folder: Path, content: str = "abc") -> Path:
    (folder / "prepared" / "inner").mkdir(parents=True)
    (folder / "prepared" / "one").write_text(content)
    (folder / "prepared" / "inner" / "two words").write_text("def")
    return folder / "prepared"


def entry(root: Path, content: str = "abc") -> Path:
    with cache.locked(root, "set"), cache.temporary_folder(root) as temporary:
        return cache.store(prepared(temporary, content), root, "set")


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def test_stored_entry_is_verified(tmp_path):
    folder = entry(tmp_path)
    assert cache.is_cached(tmp_path, "set")
    cache.verify(folder)
    assert visible(tmp_path) == ["set"]


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing", "no sums", "empty sums"])
def test_damage_is_found(tmp_path, damage):
    folder = entry(tmp_path)
    file = folder / "inner" / "two words"
    {
        "altered": lambda: file.write_text("deg"),
        "truncated": lambda: file.write_text("de"),
        "missing": file.unlink,
        "no sums": (folder / cache.CHECKSUMS).unlink,
        "empty sums": lambda: (folder / cache.CHECKSUMS).write_text(""),
    }[damage]()
    with pytest.raises(DataError, match=r"two words|SHA256SUMS"):
        cache.verify(folder)


def test_damaged_entry_is_replaced(tmp_path):
    folder = entry(tmp_path)
    (folder / "one").write_text("x")
    assert entry(tmp_path, "new") == folder
    cache.verify(folder)
    assert (folder / "one").read_text() == "new"
    assert visible(tmp_path) == ["set"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_interrupted_write_leaves_nothing(tmp_path, monkeypatch, call):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupt)
    with pytest.raises(KeyboardInterrupt):
        entry(tmp_path)
    monkeypatch.undo()
    assert not cache.is_cached(tmp_path, "set")
    assert visible(tmp_path) == []
    entry(tmp_path)  # the lock is free again


@pytest.mark.slow
def test_killed_write_leaves_no_entry(tmp_path):
    program = f"""
import os, signal
from pathlib import Path
from rootfree_lab.data import cache
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
root = Path({str(tmp_path)!r})
with cache.locked(root, "set"), cache.temporary_folder(root) as temporary:
    (temporary / "prepared").mkdir()
    (temporary / "prepared" / "one").write_text("abc")
    cache.store(temporary / "prepared", root, "set")
"""
    killed = subprocess.run([sys.executable, "-c", program])
    assert killed.returncode == -signal.SIGKILL
    assert not cache.is_cached(tmp_path, "set")
    (left,) = visible(tmp_path)
    assert left.startswith(".temporary-")
    day_ago = time.time() - 25 * 3600
    os.utime(tmp_path / left, (day_ago, day_ago))
    cache.verify(entry(tmp_path))  # the dead process holds no lock
    assert visible(tmp_path) == ["set"]  # and what it left is removed after a day


def test_folder_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("ROOTFREE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_folder() == tmp_path / ".cache" / "rootfree"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache.cache_folder() == tmp_path / "x" / "rootfree"
    monkeypatch.setenv("ROOTFREE_CACHE", str(tmp_path / "r"))
    assert cache.cache_folder() == tmp_path / "r"
    assert cache.cache_folder(tmp_path / "a") == tmp_path / "a"


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(DataError, match="cache must be a folder that can be written"),
        cache.locked(tmp_path / "file", "set"),
    ):
        pass
