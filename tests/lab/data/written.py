"""Writers of small files in the formats that the loaders read, independent of the loaders."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.sparse import csr_matrix


def pixels(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count: int, classes: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, classes, count).tolist()


def cifar_pickle(path: Path, x: np.ndarray, key: str, y: list[int]) -> None:
    """What Python 2 wrote: opcodes of protocol 2, strings as bytes; `x` (n, 32, 32, 3)."""
    planes = x.transpose(0, 3, 1, 2).reshape(len(x), -1).tobytes()
    string = lambda text: b"U" + bytes([len(text)]) + text.encode()  # noqa: E731
    integer = lambda value: b"J" + struct.pack("<i", value)  # noqa: E731
    dtype = (
        b"cnumpy\ndtype\n" + string("u1") + b"K\x00K\x01\x87R(K\x03" + string("|") + b"NNN"
        + integer(-1) * 2 + b"K\x00tb"
    )  # fmt: skip
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string("b")
        + b"\x87R(K\x01" + integer(len(x)) + integer(3072) + b"\x86" + dtype
        + b"\x89T" + struct.pack("<i", len(planes)) + planes + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(integer(value) for value in y) + b"e"
    path.write_bytes(b"\x80\x02}(" + string("data") + array + string(key) + numbers + b"u.")


def cifar10_folder(folder: Path, each: int = 4) -> tuple[np.ndarray, list[int]]:
    """The python version's files with a few images; returns those of training."""
    folder.mkdir(parents=True)
    x, y = pixels(6 * each, 32, 32, 3), labels(6 * each, 10)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part = slice(i * each, (i + 1) * each)
        cifar_pickle(folder / name, x[part], "labels", y[part])
    return x[: 5 * each], y[: 5 * each]


def cifar10_pngs(folder: Path, each: int = 4) -> tuple[np.ndarray, list[int]]:
    """The files of the npm package; returns the images and labels of training."""
    folder.mkdir(parents=True)
    x, y = pixels(6 * each, 32, 32, 3), labels(6 * each, 10)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = x[i * each : (i + 1) * each].reshape(each, 1024, 3)
        Image.fromarray(rows).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(y[: 5 * each]))
    (folder / "test_lables.json").write_text(json.dumps(y[5 * each :]))
    return x[: 5 * each], y[: 5 * each]


def idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def fashion_folder(folder: Path, suffix: str = ".gz") -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 5)):
        idx(folder / f"{part}-images-idx3-ubyte{suffix}", pixels(count, 28, 28))
        idx(folder / f"{part}-labels-idx1-ubyte{suffix}", np.arange(count) % 10)


def planetoid(path: Path, **changed: np.ndarray) -> None:
    """Five nodes in a row, three features, node 4 without label or features."""
    arrays = {
        "feat_data": np.ones(5, dtype=np.float32),
        "feat_indices": np.array([0, 1, 1, 2, 0], dtype=np.int32),
        "feat_indptr": np.array([0, 2, 3, 4, 5, 5], dtype=np.int32),
        "feat_shape": np.array([5, 3]),
        "labels": np.array([0, 1, 1, 0, -1], dtype=np.int16),
        "edges": np.array([[0, 1], [1, 2], [2, 3]], dtype=np.int32),
        "train_idx": np.array([0, 1]),
        "val_idx": np.array([2]),
        "test_idx": np.array([3]),
    }
    np.savez(path, **{**arrays, **changed})


def tgz(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def wheel(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def program(folder: Path, name: str, script: str) -> Path:
    """A stand-in for a package manager, found first on the PATH that starts with its folder."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(path, 0o755)
    return path


def ogbn_products(folder: Path, **changed: str) -> None:
    """Six nodes with three features, four edges; `changed` replaces the text of a table."""
    tables = {
        "raw/num-node-list": "6\n",
        "raw/num-edge-list": "4\n",
        "raw/node-feat": "".join(f"{i}.5,-{i},1e-{i}\n" for i in range(6)),
        "raw/node-label": "0\n1\n2\n0\n1\n2\n",
        "raw/edge": "0,1\n1,2\n4,5\n0,5\n",
        "split/sales_ranking/train": "0\n2\n",
        "split/sales_ranking/valid": "1\n",
        "split/sales_ranking/test": "3\n4\n5\n",
    }
    for name, content in tables.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = changed.get(path.name.removesuffix(".csv.gz").replace("-", "_"), content)
        path.write_bytes(gzip.compress(text.encode()))


def planetoid_files(folder: Path, name: str, *, protocol: int = 2, **changed: object) -> None:
    """Seven nodes: 0 and 1 for training, 2 and 3 known, 5 and 4 tested, 6 in no file but graph."""
    rows = {
        "x": [[1, 1, 0], [0, 1, 0]],
        "allx": [[1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]],
        "tx": [[0, 0, 3], [1, 0, 3]],
    }
    hot = {"y": [[1, 0], [0, 1]], "ally": [[1, 0], [0, 1], [0, 1], [1, 0]], "ty": [[0, 1], [1, 0]]}
    graph = defaultdict(list, {0: [1, 0], 1: [0, 2, 2], 2: [1, 5], 3: [], 4: [5], 5: [2, 4], 6: []})
    parts: dict[str, object] = {
        k: csr_matrix(np.array(v, dtype=np.float32)) for k, v in rows.items()
    }
    parts |= {k: np.array(v, dtype=np.int32) for k, v in hot.items()} | {"graph": graph} | changed
    folder.mkdir(parents=True, exist_ok=True)
    for part, value in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(value, protocol=protocol))
    (folder / f"ind.{name}.test.index").write_text("5\n4\n")
