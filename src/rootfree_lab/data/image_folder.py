"""Trees of class folders with images, such as ImageWoof10."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rootfree_lab.data.dataset import Augmentation, Dataset, fixed_permutation, images
from rootfree_lab.data.errors import DataError, existing_folder, reading

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}

Labelled = list[tuple[Path, int]]


def read_image_folder(folder: Path, *, size: int, limit: int | None) -> Dataset:
    """Read `train/CLASS/*` and `val/CLASS/*` (or `test/`), or `CLASS/*` with a fifth held out.

    The shorter side is scaled to `size` and the middle square kept. The order is a fixed
    permutation, so that the first images are of all classes; no more than `limit` are decoded.
    """
    existing_folder(folder)
    if (folder / "train").is_dir():
        held_out = next((folder / n for n in ("val", "test") if (folder / n).is_dir()), None)
        if held_out is None:
            raise DataError(f"{folder} has train/ but neither val/ nor test/.")
        classes = _classes(folder / "train")
        train, test = _list(folder / "train", classes), _list(held_out, classes)
    else:
        classes = _classes(folder)
        everything = _list(folder, classes)
        cut = len(everything) // 5
        test, train = everything[:cut], everything[cut:]
    if not train or not test:
        raise DataError(f"{folder} has {len(train)} training and {len(test)} test images.")
    return images(
        "image_folder",
        _decode(train[:limit], size),
        _decode(test[:limit], size),
        classes=len(classes),
        augmentation=Augmentation(padding=size // 8),
    )


def _classes(folder: Path) -> list[str]:
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise DataError(f"{folder} must have a folder for each class, got {classes}.")
    return classes


def _list(folder: Path, classes: list[str]) -> Labelled:
    found = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            raise DataError(f"{folder / name} is missing.")
        for path in sorted((folder / name).rglob("*")):
            if path.suffix.lower() in _SUFFIXES:
                found.append((path, label))
    return [found[i] for i in fixed_permutation(len(found))]


def _decode(files: Labelled, size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding runs outside Python's lock
        pixels = list(pool.map(lambda item: _square(item[0], size), files))
    return np.stack(pixels), np.array([label for _, label in files], dtype=np.int64)


def _square(path: Path, size: int) -> NDArray[np.uint8]:
    from PIL import Image, ImageOps

    with reading(path), Image.open(path) as image:
        # Decodes a JPEG at a fraction of its size where that is still larger than needed.
        image.draft("RGB", (2 * size, 2 * size))
        return np.asarray(
            ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC)
        )
