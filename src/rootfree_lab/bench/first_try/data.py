"""The data of the tasks: from a compact folder, or else from the laboratory's cache.

A compact folder has up to three files:

    cifar10.npz   train_x, test_x (n, 32, 32, 3) uint8, train_y, test_y (n,): 10,000 + 2,000 images
    sotu.txt      the speeches, one after the other
    cora.npz      the citation graph (see docs/data.md)
"""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import numpy as np

from rootfree_lab.data import DataError, Dataset, load
from rootfree_lab.data.dataset import images
from rootfree_lab.data.errors import existing_folder, reading
from rootfree_lab.data.text import read_text_file

CIFAR10, SOTU, CORA = "cifar10.npz", "sotu.txt", "cora.npz"
FILES = {"cifar10": CIFAR10, "sotu": SOTU, "cora": CORA}
_IMAGES = {"train": 10_000, "test": 2_000}


@lru_cache(maxsize=4)
def dataset(name: str, folder: Path | None) -> Dataset:
    """A data set by its name in the laboratory; a `DataError` says how to get one that is missing.

    The folder's compact file comes first, then what `rootfree data fetch` put into the cache.
    """
    if name not in FILES:
        return load(name)
    file = None if folder is None else existing_folder(folder) / FILES[name]
    try:
        if file is not None and file.is_file():
            return _compact(name, file)
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


def _compact(name: str, file: Path) -> Dataset:
    if name == "sotu":
        return read_text_file(file)
    if name == "cora":
        return load("cora", folder=file.parent)
    # Without pickle, so that a file cannot run code.
    with reading(file), np.load(file, allow_pickle=False) as stored:
        parts = {key: stored[key] for key in ("train_x", "train_y", "test_x", "test_y")}
    return images(
        "cifar10",
        (parts["train_x"], parts["train_y"].astype(np.int64)),
        (parts["test_x"], parts["test_y"].astype(np.int64)),
        classes=10,
    )


def _subset(found: Dataset) -> Dataset:
    """The images of the compact file, with their own statistics: the same from either source."""
    splits = (found.train.first(_IMAGES["train"]), found.test.first(_IMAGES["test"]))
    train, test = ((split.x.numpy(), split.y.numpy()) for split in splits)
    return images("cifar10", train, test, classes=10)


def _write(found: Dataset, file: Path, source: Path | None) -> None:
    if found.name == "cifar10":
        np.savez_compressed(
            file,
            train_x=found.train.x.numpy(),
            train_y=found.train.y.numpy().astype(np.uint8),
            test_x=found.test.x.numpy(),
            test_y=found.test.y.numpy().astype(np.uint8),
        )
    elif found.graph is not None:
        original = (source or Path()) / file.name
        if source is None or not original.is_file():
            raise DataError(f"--pack takes {file.name} from --data, and there is none in {source}.")
        if original.resolve() != file.resolve():
            shutil.copyfile(original, file)
    else:
        tokens = np.concatenate([found.train.x.numpy(), found.test.x.numpy()])
        file.write_bytes(tokens.astype(np.uint8).tobytes())
