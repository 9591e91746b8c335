"""The 8 x 8 digits of scikit-learn, which the examples train on: real, small, on every machine."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 1, 8, 8) in [-1, 1] and labels, to train (1,400) and to test (397) with."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return images[train], labels[train], images[test], labels[test]


def batches(batch: int = 64) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled batches of the training set; the last one is shorter."""
    images, labels, *_ = digits()
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(images, labels), batch, shuffle=True, generator=generator)


def accuracy(model: torch.nn.Module) -> float:
    """Percent of the test images that a model gets right."""
    *_, images, labels = digits()
    model.eval()
    with torch.no_grad():
        return 100 * float((model(images).argmax(1) == labels).float().mean())
