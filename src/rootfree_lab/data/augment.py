"""Random changes of a whole batch of images at once, and its normalisation.

What augmentation does to each image of an epoch is drawn for all of them when it starts.

Layout: `x` (n, H, W, C) uint8, or (n, C, H, W) float32 once it is normalised; `flip` (n,) boolean.
A box is (top, left, height, width) as fractions of the image: `boxes` (n, 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from rootfree_lab.data.dataset import Augmentation


def crop_and_flip(x: Tensor, top: Tensor, left: Tensor, flip: Tensor, *, padding: int) -> Tensor:
    """Pad with black, cut each image's window out, mirror those that are flipped.

    `top`, `left` (n,): the corner of each window in the padded image, 0 to 2 padding.
    """
    count, height, width, _ = x.shape
    padded = pad(x, (0, 0, padding, padding, padding, padding))
    rows = top[:, None] + torch.arange(height, device=x.device)
    across = torch.arange(width, device=x.device)
    # A mirrored window is the same window read from its right end.
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - across, across)
    image = torch.arange(count, device=x.device)
    return padded[image[:, None, None], rows[:, :, None], columns[:, None, :]]


def resized_crop(x: Tensor, boxes: Tensor, flip: Tensor) -> Tensor:
    """Scale each image's box to the size of the image, bilinearly; mirror those that are flipped.

    A box is never larger than the image, so nothing is scaled down and nothing aliases.
    """
    rows, columns = (_centres(d, x.device) for d in x.shape[1:3])
    top, left, height, width = (part[:, None] for part in boxes.unbind(1))
    across = torch.where(flip[:, None], 1 - columns, columns)
    grid = torch.stack(
        [
            (left + width * across)[:, None, :].expand(-1, len(rows), -1),
            (top + height * rows)[:, :, None].expand(-1, -1, len(columns)),
        ],
        -1,
    )
    planes = x.permute(0, 3, 1, 2).float()
    found = grid_sample(planes, 2 * grid - 1, padding_mode="border", align_corners=False)
    return found.round().to(torch.uint8).permute(0, 2, 3, 1)


def erase(x: Tensor, boxes: Tensor, noise: Tensor, corners: Tensor) -> Tensor:
    """Fill each image's box with noise; a box of height zero leaves the image as it is.

    `x` (n, C, H, W) is normalised. Its noise is the window of `noise` (C, 2H, 2W) that has its
    corner at `corners` (n, 2).
    """
    rows, columns = (_centres(d, x.device) for d in x.shape[2:])
    top, left, height, width = (part[:, None] for part in boxes.unbind(1))
    inside_rows = (rows >= top) & (rows < top + height)
    inside_columns = (columns >= left) & (columns < left + width)
    inside = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
    y = corners[:, :1] + torch.arange(x.shape[2], device=x.device)
    z = corners[:, 1:] + torch.arange(x.shape[3], device=x.device)
    windows = noise[:, y[:, :, None], z[:, None, :]].transpose(0, 1)
    return torch.where(inside, windows, x)


def boxes_of(uniform: Tensor, *, area: tuple[float, float], ratio: tuple[float, float]) -> Tensor:
    """Boxes of random area, shape (height to width) and place, from numbers in [0, 1): (n, 4).

    The logarithm of the shape is uniform; a box that would stick out of the image is cut.
    """
    share = area[0] + (area[1] - area[0]) * uniform[:, 0]
    low, high = (math.log(end) for end in ratio)
    shape = (low + (high - low) * uniform[:, 1]).exp()
    height = (share * shape).sqrt().clamp(max=1)
    width = (share / shape).sqrt().clamp(max=1)
    top, left = uniform[:, 2] * (1 - height), uniform[:, 3] * (1 - width)
    return torch.stack([top, left, height, width], 1)


def normalise(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Bytes (n, H, W, C) to float32 (n, C, H, W): `(x / 255 - mean) / std` per channel."""
    scale = 1 / (255 * std)
    return (x.float() * scale - mean / std).permute(0, 3, 1, 2).contiguous()


def _centres(count: int, device: torch.device) -> Tensor:
    """Where the pixels of an axis are, as fractions of it."""
    return (torch.arange(count, device=device) + 0.5) / count


# Those of Inception's training, and of random erasing (Zhong et al. 2020) as timm has it.
_CROP_AREA, _CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_ERASED_AREA, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


class Draws:
    """Random numbers from a generator, wherever it lives, on the device of the images."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator, self._device = generator, device

    def order(self, count: int) -> Tensor:
        return self._moved(torch.randperm, count)

    def integers(self, end: int, count: int) -> Tensor:
        """Uniform in 0 to end - 1; nothing is drawn where there is no choice."""
        if end == 1:
            return torch.zeros(count, dtype=torch.int64, device=self._device)
        return self._moved(torch.randint, end, (count,))

    def uniform(self, *shape: int) -> Tensor:
        return self._moved(torch.rand, shape)

    def normal(self, *shape: int) -> Tensor:
        return self._moved(torch.randn, shape)

    def _moved(self, make: Callable[..., Tensor], *arguments: object) -> Tensor:
        made = make(*arguments, generator=self._generator, device=self._generator.device)
        return made.to(self._device)


class ImageChanges:
    """The changes of one epoch: of `count` images (n, H, W, C), by their number in the split."""

    def __init__(self, augmentation: Augmentation, shape: torch.Size, draws: Draws) -> None:
        count, height, width, channels = shape
        self._padding = augmentation.padding
        self.boxes: Tensor | None = None
        if augmentation.resized:
            self.boxes = boxes_of(draws.uniform(count, 4), area=_CROP_AREA, ratio=_CROP_RATIO)
        else:
            end = 2 * augmentation.padding + 1
            self.top, self.left = draws.integers(end, count), draws.integers(end, count)
        self.flip = draws.integers(2 if augmentation.flip else 1, count).bool()
        self.erased: Tensor | None = None
        if augmentation.erase > 0:
            boxes = boxes_of(draws.uniform(count, 4), area=_ERASED_AREA, ratio=_ERASED_RATIO)
            self.erased = boxes * (draws.uniform(count, 1) < augmentation.erase)
            self._noise = draws.normal(channels, 2 * height, 2 * width)
            self._corners = torch.stack(
                [draws.integers(height + 1, count), draws.integers(width + 1, count)], 1
            )

    def __call__(self, x: Tensor, index: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """The images `x` (n, H, W, C) with these numbers, changed and normalised."""
        flip = self.flip[index]
        if self.boxes is not None:
            x = resized_crop(x, self.boxes[index], flip)
        else:
            x = crop_and_flip(x, self.top[index], self.left[index], flip, padding=self._padding)
        made = normalise(x, mean, std)
        if self.erased is not None:
            made = erase(made, self.erased[index], self._noise, self._corners[index])
        return made
