"""Batches of one epoch, made on the training device from tensors that stay there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rootfree_lab.data.augment import Draws, ImageChanges, normalise
from rootfree_lab.data.dataset import Dataset, Split
from rootfree_lab.data.errors import DataError


class Batches:
    """Iterates one epoch of `(x, y)` on a device.

    Images come as normalised float32 (n, C, H, W), tabular examples as they are, text as two
    windows (n, context) of which the second is one token ahead. The split is moved to the device
    once.

    Everything random is drawn from the generator when an epoch starts, for the whole epoch: the
    same state of the generator gives the same batches on every device, no batch waits for the
    host, and an epoch is resumed with the state at its start and `starting_at`.

    Args:
        split: A split of `dataset`.
        dataset: Tells kind and normalisation.
        batch_size: Examples, or windows of text, in a batch.
        device: Where the batches are made.
        generator: Source of order, crops and flips.
        augment: Change images at random as `dataset.augmentation` says; let the windows of text
            start at a random offset, or each anywhere.
        context: Tokens of a window, for text.
        drop_last: Leave out what does not fill a batch.
        shuffle: A new order in every epoch; without it, the order of the split.

    >>> from rootfree_lab.data import load
    >>> digits = load("digits")
    >>> batches = Batches(digits.train, digits, batch_size=64, device="cpu",
    ...                   generator=torch.Generator().manual_seed(0), augment=True)
    >>> x, y = next(iter(batches))
    >>> len(batches), tuple(x.shape), tuple(y.shape)
    (22, (64, 1, 8, 8), (64,))
    """

    def __init__(
        self,
        split: Split,
        dataset: Dataset,
        *,
        batch_size: int,
        device: torch.device | str,
        generator: torch.Generator,
        augment: bool,
        context: int = 0,
        drop_last: bool = True,
        shuffle: bool = True,
    ) -> None:
        if dataset.kind == "graph":
            raise DataError(f"{dataset.name!r} is a graph: it has no batches, use dataset.graph.")
        text = dataset.kind == "text"
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}.")
        if text != (context > 0):
            allowed = "at least 1 for text" if text else "0 for what is not text"
            raise DataError(f"context must be {allowed}, got {context}.")
        self._kind, self._batch_size, self._context = dataset.kind, batch_size, context
        self._shuffle = shuffle
        self._augment, self._augmentation = augment, dataset.augmentation
        self._x, self._y = split.x.to(device), split.y.to(device)
        self._draws = Draws(generator, self._x.device)
        if dataset.kind == "images":
            self._mean = torch.tensor(dataset.mean, device=device)
            self._std = torch.tensor(dataset.std, device=device)
        self._count = self._examples()
        if self._count < (batch_size if drop_last else 1):
            what = f"windows of {context} tokens" if text else "examples"
            raise DataError(
                f"batch_size must be at most the number of {what}, {self._count}; got {batch_size}."
            )
        self._batches = self._count // batch_size if drop_last else -(-self._count // batch_size)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch without its first batches: the same ones that a full epoch would end with."""
        if not 0 <= batch <= len(self):
            raise DataError(f"batch must be in 0 to {len(self)}, got {batch}.")
        # Drawn at once, not when the first batch is taken.
        every = torch.arange(self._count, device=self._x.device)
        if self._kind == "text" and self._augment and self._augmentation.anywhere:
            count = self._batches * self._batch_size
            starts = self._draws.integers(len(self._x) - self._context - 1, count)
            return self._windows(starts, batch)
        order = self._draws.order(self._count) if self._shuffle else every
        if self._kind == "text":
            offset = self._draws.integers(self._context if self._augment else 1, 1)
            return self._windows(order * self._context + offset, batch)
        if self._kind == "images":
            drawn = self._augmentation, self._x.shape, self._draws
            return self._images(order, ImageChanges(*drawn) if self._augment else None, batch)
        return ((self._x[index], self._y[index]) for index in self._indices(order, batch))

    def _examples(self) -> int:
        if self._kind != "text":
            return len(self._x)
        # The last window needs one more token for its targets, and a random offset shifts all
        # windows by up to context - 1.
        spare = self._context - 1 if self._augment else 0
        return max(len(self._x) - 1 - spare, 0) // self._context

    def _indices(self, order: Tensor, batch: int) -> Iterator[Tensor]:
        for number in range(batch, self._batches):
            yield order[number * self._batch_size : (number + 1) * self._batch_size]

    def _images(
        self, order: Tensor, changes: ImageChanges | None, batch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self._indices(order, batch):
            x, how = self._x[index], (self._mean, self._std)
            made = normalise(x, *how) if changes is None else changes(x, index, *how)
            yield made, self._y[index]

    def _windows(self, starts: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        within = torch.arange(self._context, device=self._x.device)
        for some in self._indices(starts, batch):
            places = some[:, None] + within
            yield self._x[places], self._x[places + 1]
