"""A data set in memory: its splits, and what a model needs to know about them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootfree_lab.data.errors import DataError

# How many images are summed at a time, to bound the memory of the wider integers.
_CHUNK = 4096


@dataclass(frozen=True)
class Split:
    """One part of a data set.

    Images: `x` uint8 (n, H, W, C); tabular: float32 (n, d), standardised; text: int64 tokens (n,).
    `y`: int64 class labels (n,), float32 regression targets (n,), empty for text.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def first(self, count: int) -> Split:
        return Split(self.x[:count], self.y[:count])


@dataclass(frozen=True)
class Graph:
    """One graph with labelled nodes; label -1 says that a node has none."""

    features: Tensor  # (n, f) float32
    edges: Tensor  # (2, m) int64, each undirected edge in both directions
    labels: Tensor  # (n,) int64
    train: Tensor  # node numbers, int64
    validation: Tensor
    test: Tensor

    def to(self, device: torch.device) -> Graph:
        return Graph(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Augmentation:
    """How training images may be changed without changing their label; and windows of text."""

    padding: int = 4  # black pixels around the image, of which a random crop is taken
    flip: bool = True  # left-right
    resized: bool = False  # instead of the padding: a random part, scaled to the whole image
    erase: float = 0.0  # probability that a random box is filled with noise
    anywhere: bool = False  # windows of a text start anywhere, not at multiples of their length


@dataclass(frozen=True)
class Dataset:
    """A data set in memory."""

    name: str
    kind: str  # "images" | "tabular" | "text" | "graph"
    train: Split
    test: Split
    validation: Split | None
    classes: int  # vocabulary size for text, 0 for regression
    shape: tuple[int, ...]  # of one example: (C, H, W), (d,), () for text
    mean: tuple[float, ...] = ()  # of the training split: per channel in [0, 1], or per feature
    std: tuple[float, ...] = ()
    graph: Graph | None = None
    augmentation: Augmentation = Augmentation()


def images(
    name: str,
    train: tuple[NDArray[np.uint8], NDArray[np.int64]],
    test: tuple[NDArray[np.uint8], NDArray[np.int64]],
    *,
    classes: int,
    augmentation: Augmentation = Augmentation(),  # noqa: B008 (frozen)
) -> Dataset:
    """A data set of images (n, H, W, C) and labels."""
    splits = [_image_split(name, *part, classes=classes) for part in (train, test)]
    height, width, channels = splits[0].x.shape[1:]
    mean, std = _channel_statistics(splits[0].x.numpy())
    return Dataset(
        name, "images", splits[0], splits[1], None, classes, (channels, height, width),
        mean, std, augmentation=augmentation,
    )  # fmt: skip


def tabular(
    name: str, x: NDArray[np.float64], y: NDArray[np.float64] | NDArray[np.int64], *, classes: int
) -> Dataset:
    """Hold one fifth out by a fixed permutation, standardise by what remains.

    The targets of a regression are standardised too: a square loss of one is then that of the
    constant prediction.
    """
    order = fixed_permutation(len(y))
    x, y = x[order], y[order]
    held_out = len(y) // 5
    if not held_out:
        raise DataError(f"{name} needs at least 5 examples, got {len(y)}.")
    mean, std = _standard(x[held_out:])
    x = (x - mean) / std
    targets = torch.from_numpy(np.ascontiguousarray(y))
    if classes:
        targets = targets.long()
    else:
        center, scale = _standard(y[held_out:].astype(np.float64))
        targets = ((targets.double() - float(center)) / float(scale)).float()
    features = torch.from_numpy(x).float()
    return Dataset(
        name, "tabular",
        Split(features[held_out:], targets[held_out:]),
        Split(features[:held_out], targets[:held_out]),
        None, classes, (x.shape[1],), tuple(mean.tolist()), tuple(std.tolist()),
    )  # fmt: skip


def of_graph(name: str, graph: Graph) -> Dataset:
    """The data set of a graph; its splits are rows of its nodes."""
    train, validation, test = (
        Split(graph.features[part], graph.labels[part])
        for part in (graph.train, graph.validation, graph.test)
    )
    classes, features = int(graph.labels.max()) + 1, graph.features.shape[1]
    return Dataset(name, "graph", train, test, validation, classes, (features,), graph=graph)


def limited(dataset: Dataset, limit: int) -> Dataset:
    """The first `limit` examples of each split; what normalises them stays that of the whole."""
    if dataset.graph is not None:
        raise DataError(f"limit cannot be applied to the graph {dataset.name!r}: leave it out.")
    validation = dataset.validation
    return replace(
        dataset,
        train=dataset.train.first(limit),
        test=dataset.test.first(limit),
        validation=None if validation is None else validation.first(limit),
    )


def fixed_permutation(count: int) -> NDArray[np.int64]:
    """The same order on every machine, so that a split belongs to the data set."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order.numpy()  # type: ignore[no-any-return]


def _image_split(name: str, x: NDArray[np.uint8], y: NDArray[np.int64], *, classes: int) -> Split:
    if len(x) != len(y) or not len(x):
        raise DataError(f"{name} has {len(x)} images and {len(y)} labels: a file is damaged.")
    if y.min() < 0 or y.max() >= classes:
        raise DataError(f"{name} has labels outside 0 to {classes - 1}: a file is damaged.")
    # A copy: what comes from a file buffer may be read-only, which a tensor cannot express.
    return Split(torch.from_numpy(np.array(x, dtype=np.uint8)), torch.from_numpy(y).long())


def _channel_statistics(x: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of pixels in [0, 1], from exact integer sums."""
    channels = x.shape[-1]
    total = np.zeros(channels, dtype=np.uint64)
    squares = np.zeros(channels, dtype=np.uint64)
    for start in range(0, len(x), _CHUNK):
        pixels = x[start : start + _CHUNK].reshape(-1, channels)
        total += pixels.sum(0, dtype=np.uint64)
        squares += np.square(pixels, dtype=np.uint16).sum(0, dtype=np.uint64)  # 255² < 2¹⁶
    count = x.size // channels
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - np.square(mean), 0))
    std[std == 0] = 255  # a constant channel becomes zero, not infinite
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def _standard(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    mean, std = np.asarray(values.mean(0)), np.asarray(values.std(0))
    # A constant feature becomes zero; rounding gives it a std near eps instead of zero.
    return mean, np.where(std > 1e-12 * np.maximum(np.abs(mean), 1), std, 1.0)
