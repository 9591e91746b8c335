"""Image classification: digits of 8 x 8 pixels, and a part of CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rootfree_lab import models
from rootfree_lab.bench.first_try.data import dataset
from rootfree_lab.bench.first_try.task import Measured, Setting, Task, batch_indices, classified
from rootfree_lab.data import Dataset
from rootfree_lab.data.augment import crop_and_flip, normalise

_PADDING = 4
_AT_ONCE = 500  # test images


def mlp_digits(setting: Setting) -> Task:
    """Two hidden layers of 64 units."""
    return _on_digits(setting, lambda data: models.build("mlp", data))


def cnn_bn_digits(setting: Setting) -> Task:
    """Two convolutions with batch normalisation and two linear layers."""
    return _on_digits(setting, _cnn_with_batch_norm)


def cnn_digits(setting: Setting) -> Task:
    """The same without batch normalisation."""
    return _on_digits(setting, lambda data: models.build("small_cnn", data))


def resnet_cifar10(setting: Setting) -> Task:
    """ResNet-18; small: one narrow block a stage."""
    return _on_cifar10(setting, "resnet18" if setting.full else "resnet_micro")


def vgg_cifar10(setting: Setting) -> Task:
    """VGG-16 with batch normalisation; small: three convolutions."""
    return _on_cifar10(setting, "vgg16_bn" if setting.full else "vgg_micro")


def vit_cifar10(setting: Setting) -> Task:
    """A vision transformer with patches of 4 x 4: 6 layers of width 192; small: 3 of width 48."""
    width, depth = (192, 6) if setting.full else (48, 3)
    return _on_cifar10(setting, "small_vit", width=width, depth=depth, heads=width // 16, patch=4)


def _cnn_with_batch_norm(data: Dataset, width: int = 16) -> nn.Module:
    channels, height, side = data.shape
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 2) * (side // 2), 2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, data.classes),
    )


def _on_digits(setting: Setting, build: Callable[[Dataset], nn.Module]) -> Task:
    data = dataset("digits", None)
    return _classification(setting, data, build(data), batch=64, images=None, augment=False)


def _on_cifar10(setting: Setting, name: str, **options: int) -> Task:
    data = dataset("cifar10", setting.data)
    return _classification(
        setting,
        data,
        models.build(name, data, **options),
        batch=128 if setting.full else 32,
        images=None if setting.full else 1000,
        augment=setting.full,
        autocast=True,
    )


def _classification(
    setting: Setting,
    data: Dataset,
    model: nn.Module,
    *,
    batch: int,
    images: int | None,
    augment: bool,
    autocast: bool = False,
) -> Task:
    device = setting.device
    model = model.to(device)
    mean, std = (torch.tensor(each, device=device) for each in (data.mean, data.std))
    bytes_ = data.train.x[:images].to(device)
    labels = data.train.y[:images].to(device)
    indices = batch_indices(setting, len(labels), batch)
    test_x, test_y = normalise(data.test.x.to(device), mean, std), data.test.y.to(device)

    if augment:
        changed = _crops_and_flips(setting, bytes_, indices)

        def inputs(step: int) -> Tensor:
            x = normalise(changed(step), mean, std)
            return x.contiguous(memory_format=torch.channels_last)  # fast in bf16 on a GPU
    else:
        ready = normalise(bytes_, mean, std)

        def inputs(step: int) -> Tensor:
            return ready[indices[step]]

    def loss(step: int) -> Tensor:
        return cross_entropy(model(inputs(step)), labels[indices[step]])

    def evaluate() -> Measured:
        return classified(torch.cat([model(x) for x in test_x.split(_AT_ONCE)]), test_y)

    return Task(model, loss, batch, evaluate, autocast=autocast)


def _crops_and_flips(setting: Setting, images: Tensor, indices: Tensor) -> Callable[[int], Tensor]:
    """The images of a step, each cut from its padded self and half of them mirrored."""
    generator = setting.generator()
    shape, device = tuple(indices.shape), images.device
    top, left = (
        torch.randint(2 * _PADDING + 1, shape, generator=generator).to(device) for _ in range(2)
    )
    flip = (torch.rand(shape, generator=generator) < 0.5).to(device)

    def changed(step: int) -> Tensor:
        return crop_and_flip(
            images[indices[step]], top[step], left[step], flip[step], padding=_PADDING
        )

    return changed
