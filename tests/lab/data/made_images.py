"""A small data set of random images."""

from __future__ import annotations

import torch

from rootfree_lab.data import Augmentation, Dataset, Split


def image_set(count: int = 10, height: int = 6, width: int = 5, flip: bool = True) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(256, (count, height, width, 3), generator=generator, dtype=torch.uint8)
    split = Split(x, torch.arange(count))
    return Dataset(
        "some", "images", split, split, None, count, (3, height, width),
        (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), augmentation=Augmentation(2, flip),
    )  # fmt: skip
