"""Models of convex problems, and the smallest that is not one."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.data import Dataset


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
