"""Small models: of convex problems, a perceptron, and two for images on a laptop's processor."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.data import Dataset
from rootfree_lab.torchvision_shim import make_importable


def linear(data: Dataset, *, bias: bool = True) -> nn.Module:
    """One linear map of the features: with the square loss, least squares."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(data.shape), max(data.classes, 1), bias=bias)
    )


def logistic(data: Dataset, *, bias: bool = True) -> nn.Module:
    """One linear map to class scores: with cross entropy, (multinomial) logistic regression."""
    if data.classes < 2:
        raise ConfigError(
            f"the model 'logistic' needs data with classes, got {data.classes}; take 'linear'"
        )
    return linear(data, bias=bias)


def mlp(data: Dataset, *, width: int = 64, depth: int = 2) -> nn.Module:
    """`depth` hidden layers of `width` units."""
    sizes = [math.prod(data.shape), *[width] * depth]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], max(data.classes, 1)))


def small_cnn(data: Dataset, *, width: int = 16, batch_norm: bool = False) -> nn.Module:
    """Two convolutions and two linear layers; 20 thousand parameters on 8×8 digits."""
    channels, height, side = data.shape
    if height % 2 or side % 2:
        raise ConfigError(f"small_cnn needs images with even sides, got {height}x{side}")
    # Larger images are pooled once more, or the first linear layer would be all of the model.
    pool = 2 if height % 4 or side % 4 or height < 16 else 4
    pixels = (height // pool) * (side // pool)
    layers: list[nn.Module] = []
    for a, b in ((channels, width), (width, 2 * width)):
        layers.append(nn.Conv2d(a, b, 3, padding=1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(b), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return nn.Sequential(
        *layers,
        nn.MaxPool2d(pool),
        nn.Flatten(),
        nn.Linear(2 * width * pixels, 2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, data.classes),
    )


def small_vit(
    data: Dataset, *, width: int = 64, depth: int = 4, heads: int = 4, patch: int | None = None
) -> nn.Module:
    """A vision transformer of timm with 200 thousand parameters, 49 patches or more."""
    make_importable()
    from timm.models.vision_transformer import VisionTransformer

    channels, height, side = data.shape
    if patch is None:
        patch = max(
            p for p in range(1, 1 + max(1, min(height, side) // 7)) if not (height % p or side % p)
        )
    elif height % patch or side % patch:
        raise ConfigError(f"patch must divide the image's sides {height}x{side}, got {patch}")
    model: nn.Module = VisionTransformer(
        img_size=(height, side),
        patch_size=patch,
        in_chans=channels,
        num_classes=data.classes,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=4.0,
    )
    return model
