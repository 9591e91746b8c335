"""MNIST, from the four unpacked idx files."""

import numpy as np

from rootfree_lab import data


def load(folder):
    """For `data.name = "mnist.py:load"`; `data.folder` has the files."""

    def part(name):
        images = np.fromfile(f"{folder}/{name}-images-idx3-ubyte", dtype=np.uint8)[16:]
        labels = np.fromfile(f"{folder}/{name}-labels-idx1-ubyte", dtype=np.uint8)[8:]
        return images.reshape(-1, 28, 28, 1), labels.astype(np.int64)

    return data.images("mnist", part("train"), part("t10k"), classes=10)
