"""Fashion-MNIST in the form of CIFAR-10: 32 x 32 pixels, three equal channels."""

import numpy as np

from rootfree_lab import data


def load(folder=None):
    """For `data.name = "fashion_rgb.py:load"`."""
    fashion = data.load("fashion_mnist", folder=folder)
    margin = (32 - fashion.shape[1]) // 2

    def as_rgb(split: data.Split):
        padded = np.pad(split.x.numpy(), ((0, 0), (margin, margin), (margin, margin), (0, 0)))
        return np.repeat(padded, 3, axis=3), split.y.numpy()

    parts = as_rgb(fashion.train), as_rgb(fashion.test)
    return data.images("fashion_rgb", *parts, classes=fashion.classes)
