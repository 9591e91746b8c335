"""The data of the tasks: from a compact folder, or else from the laboratory's cache.

A compact folder has up to three files:

    cifar10.npz   train_x, test_x (n, 32, 32, 3) uint8, train_y, test_y (n,): 10,000 + 2,000 images
    sotu.txt      the speeches, one after the other
    cora.npz      the citation graph (see docs/data.md)
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from rootfree_lab.data import DataError, Dataset, load
from rootfree_lab.data.dataset import images
from rootfree_lab.data.errors import existing_folder, reading
from rootfree_lab.data.text import read_text_file

FILES = {"cifar10": "cifar10.npz", "sotu": "sotu.txt", "cora": "cora.npz"}
_PARTS = {"train": 10_000, "test": 2_000}  # images


def cifar10(folder: Path | None = None, limit: int | None = None) -> Dataset:
    """A part of CIFAR-10, or the first so many of its training images."""
    found = dataset("cifar10", folder)
    return replace(found, train=found.train.first(limit or len(found.train)))


def sotu(folder: Path | None = None, limit: int | None = None) -> Dataset:
    """The speeches, tested with all or with the first so many tokens of what is held out."""
    found = dataset("sotu", folder)
    return replace(found, test=found.test.first(limit or len(found.test)))


def cora(folder: Path | None = None) -> Dataset:
    """The citation graph."""
    return dataset("cora", folder)


@lru_cache(maxsize=4)
def dataset(name: str, folder: Path | None) -> Dataset:
    """One of `FILES`, whole; a `DataError` says how to get one that is missing.

    The folder's compact file comes first, then what `rootfree data fetch` put into the cache.
    """
    file = None if folder is None else existing_folder(folder) / FILES[name]
    try:
        if file is not None and file.is_file() and name != "cora":
            return read_text_file(file) if name == "sotu" else _images(file)
        found = load(name, folder=folder if name == "cora" else None)
    except DataError as error:
        raise DataError(f"{error} Or give --data FOLDER with {FILES[name]}.") from error
    return _subset(found) if name == "cifar10" else found


def pack(folder: Path, source: Path | None = None) -> list[str]:
    """Write the compact folder; one line for each file, or why it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, file in FILES.items():
        try:
            _write(dataset(name, source), folder / file, source)
        except DataError as error:
            lines.append(f"{file}: left out, {error}")
            continue
        lines.append(f"{file}: {(folder / file).stat().st_size / 1e6:.1f} MB")
    return lines


def _images(file: Path) -> Dataset:
    # Without pickle, so that a file cannot run code.
    with reading(file), np.load(file, allow_pickle=False) as stored:
        train, test = (
            (stored[f"{part}_x"], stored[f"{part}_y"].astype(np.int64)) for part in _PARTS
        )
    return images("cifar10", train, test, classes=10)


def _subset(found: Dataset) -> Dataset:
    """The images of the compact file, with their own statistics: the same from either source."""
    splits = (getattr(found, part).first(count) for part, count in _PARTS.items())
    train, test = ((split.x.numpy(), split.y.numpy()) for split in splits)
    return images("cifar10", train, test, classes=10)


def _write(found: Dataset, file: Path, source: Path | None) -> None:
    if found.name == "cifar10":
        arrays = {f"{part}_x": getattr(found, part).x.numpy() for part in _PARTS}
        labels = {f"{part}_y": getattr(found, part).y.numpy().astype(np.uint8) for part in _PARTS}
        np.savez_compressed(file, **arrays, **labels)
    elif found.graph is not None:
        original = (source or Path()) / file.name
        if source is None or not original.is_file():
            raise DataError(f"--pack takes {file.name} from --data, and there is none in {source}.")
        if original.resolve() != file.resolve():
            shutil.copyfile(original, file)
    else:
        tokens = np.concatenate([found.train.x.numpy(), found.test.x.numpy()])
        file.write_bytes(tokens.astype(np.uint8).tobytes())
