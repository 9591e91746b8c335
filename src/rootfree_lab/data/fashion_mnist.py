"""Fashion-MNIST: idx files, compressed or not, from a folder or from the Debian package."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootfree_lab.data.dataset import Dataset, images
from rootfree_lab.data.errors import DataError, existing_folder, reading
from rootfree_lab.data.unpacking import gunzip

# Where the package dataset-fashion-mnist puts its files.
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

# SHA-256 of the uncompressed content (the compression differs between distributions) and number
# of examples. A file with that many examples must be the published one.
PUBLISHED = {
    "train-images-idx3-ubyte": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888", 60_000),
    "train-labels-idx1-ubyte": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9", 60_000),
    "t10k-images-idx3-ubyte": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b", 10_000),
    "t10k-labels-idx1-ubyte": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34", 10_000),
}  # fmt: skip

_UNSIGNED_BYTE = 0x08


def read_fashion_mnist(folder: Path) -> Dataset:
    """Read a folder with the four idx files."""
    folder = existing_folder(folder, "FashionMNIST/raw")  # where torchvision puts them
    train, test = (
        (
            _idx(folder, f"{part}-images-idx3-ubyte", axes=3)[..., None],
            _idx(folder, f"{part}-labels-idx1-ubyte", axes=1).astype(np.int64),
        )
        for part in ("train", "t10k")
    )
    return images("fashion_mnist", train, test, classes=10)


def debian_folder() -> Path | None:
    """The folder of the installed Debian package, if it is there."""
    return DEBIAN_FOLDER if DEBIAN_FOLDER.is_dir() else None


def _idx(folder: Path, name: str, *, axes: int) -> NDArray[Any]:
    """An idx file: two zero bytes, element type, number of axes, their lengths, the elements."""
    path = folder / f"{name}.gz"
    if not path.exists() and (folder / name).exists():
        path = folder / name
    with reading(path):
        content = gunzip(path) if path.suffix == ".gz" else path.read_bytes()
        if content[:4] != bytes([0, 0, _UNSIGNED_BYTE, axes]):
            raise ValueError(f"it is not an idx file of bytes with {axes} axes")
        start = 4 + 4 * axes
        shape = tuple(np.frombuffer(content[4:start], dtype=">u4").tolist())
        array = np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
    digest, count = PUBLISHED[name]
    if len(array) == count and hashlib.sha256(content).hexdigest() != digest:
        raise DataError(f"{path} is altered: its checksum is not that of the published file.")
    return array
