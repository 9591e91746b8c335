"""Resized crops and erasing against slow loops, and what an epoch draws of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from lab.data.made_images import image_set
from rootfree_lab.data import Augmentation, Batches
from rootfree_lab.data.augment import Draws, ImageChanges, boxes_of, erase, normalise, resized_crop


def bilinear(image: np.ndarray, y: float, z: float) -> np.ndarray:
    """The image at a point, in pixels; pixel (i, j) has its centre at (i + ½, j + ½)."""
    height, width = image.shape[:2]
    y, z = np.clip(y - 0.5, 0, height - 1), np.clip(z - 0.5, 0, width - 1)
    i, j = int(y), int(z)
    a, b = y - i, z - j
    k, m = min(i + 1, height - 1), min(j + 1, width - 1)
    top = (1 - b) * image[i, j] + b * image[i, m]
    return (1 - a) * top + a * ((1 - b) * image[k, j] + b * image[k, m])


def test_resized_crop_against_a_loop():
    x = image_set(12).train.x
    uniform = torch.rand(12, 4, generator=torch.Generator().manual_seed(0))
    boxes = boxes_of(uniform, area=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    flip = torch.arange(12) % 2 == 0
    found = resized_crop(x, boxes, flip).numpy()
    height, width = x.shape[1:3]
    for i, image in enumerate(x.double().numpy()):
        top, left, tall, wide = boxes[i].tolist()
        for row in range(height):
            for column in range(width):
                place = width - 1 - column if flip[i] else column
                y = (top + tall * (row + 0.5) / height) * height
                z = (left + wide * (place + 0.5) / width) * width
                # Half a grey level of rounding, and float32 against float64 near its middle.
                assert np.abs(found[i, row, column] - bilinear(image, y, z)).max() <= 0.501


def test_the_whole_image_is_a_crop_that_changes_nothing():
    x = image_set(3).train.x
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(3, 4)
    same = torch.zeros(3, dtype=torch.bool)
    assert torch.equal(resized_crop(x, whole, same), x)
    assert torch.equal(resized_crop(x, whole, ~same), x.flip(2))


def test_boxes_are_inside_with_the_area_and_shape_asked_for():
    uniform = torch.rand(5000, 4, generator=torch.Generator().manual_seed(0))
    boxes = boxes_of(uniform, area=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3))
    top, left, height, width = boxes.unbind(1)
    assert min(top.min(), left.min()) >= 0
    assert max((top + height).max(), (left + width).max()) <= 1 + 1e-6
    uncut = (height < 1) & (width < 1)
    area, shape = (height * width)[uncut], (height / width)[uncut]
    assert 0.02 <= area.min() < 0.025
    assert 0.32 < area.max() <= 1 / 3 + 1e-6
    assert abs(area.mean() - (0.02 + 1 / 3) / 2) < 0.01
    assert 0.3 - 1e-5 <= shape.min() < 0.32
    assert 3.1 < shape.max() <= 1 / 0.3 + 1e-4


def test_erase_against_a_loop():
    torch.manual_seed(0)
    x = torch.zeros(4, 3, 6, 5)
    noise = torch.randn(3, 12, 10)
    boxes = torch.tensor([[0, 0, 0.5, 1], [0.5, 0.2, 0.25, 0.4], [0, 0, 1, 1], [0, 0, 0, 0]])
    corners = torch.tensor([[0, 0], [6, 5], [2, 3], [1, 1]])
    found = erase(x, boxes, noise, corners)
    for i in range(4):
        top, left, tall, wide = boxes[i].tolist()
        for row in range(6):
            for column in range(5):
                inside = (
                    top <= (row + 0.5) / 6 < top + tall and left <= (column + 0.5) / 5 < left + wide
                )
                y, z = corners[i].tolist()
                expected = noise[:, row + y, column + z] if inside else torch.zeros(3)
                assert torch.equal(found[i, :, row, column], expected)


def test_erase_takes_the_share_of_images_that_is_asked_for():
    draws = Draws(torch.Generator().manual_seed(0), torch.device("cpu"))
    changes = ImageChanges(Augmentation(0, False, erase=0.25), (4000, 8, 8, 3), draws)
    share = (changes.erased[:, 2] > 0).float().mean()
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    x = torch.zeros(4000, 8, 8, 3, dtype=torch.uint8)
    made = changes(x, torch.arange(4000), torch.full((3,), 0.5), torch.ones(3))
    noise = made[made != -0.5]
    assert abs(noise.mean()) < 0.1
    assert abs(noise.std() - 1) < 0.1


def test_the_generator_decides_and_an_epoch_resumes():
    dataset = image_set(10, 8, 8)
    dataset = replace(dataset, augmentation=replace(dataset.augmentation, resized=True, erase=0.5))

    def make():
        generator = torch.Generator().manual_seed(3)
        return Batches(
            dataset.train, dataset, batch_size=2, device="cpu", generator=generator, augment=True
        )

    whole, again = list(make()), list(make())
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, again, strict=True))
    later = list(make().starting_at(3))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[3:], later, strict=True))
    mean, std = torch.tensor(dataset.mean), torch.tensor(dataset.std)
    plain = normalise(dataset.train.x, mean, std)
    assert not any(torch.equal(image, plain[int(i)]) for x, y in whole for image, i in zip(x, y))  # noqa: B905
