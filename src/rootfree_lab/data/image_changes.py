"""What augmentation does to each image of an epoch, drawn for all of them when it starts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rootfree_lab.data.augment import boxes_of, crop_and_flip, erase, normalise, resized_crop
from rootfree_lab.data.dataset import Augmentation

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
