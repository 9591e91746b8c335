"""Whether a loss is the average that `batch_size` says: how many terms it has, and their weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rootfree.recorders.losses import LOSSES
from rootfree.recorders.ranks import GradientRanks

# Gradients in half precision are off by under one part in a hundred.
_TOLERANCE = 1.05


class LossScale:
    """What was seen of a loss since the context was entered."""

    _terms: list[int]  # in each way of counting them
    _weight: Tensor | None  # lower bound on the weight of a term in the loss
    _seen: bool  # whether any rank has seen the loss

    def __init__(self, loss: str | None, ranks: GradientRanks) -> None:
        self._loss, self._ranks = loss, ranks
        self._trusted: set[int] = set()  # batch sizes whose scale was found right
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        ways = 0 if self._loss is None else len(LOSSES[self._loss].terms(torch.empty(1, 1)))
        self._terms, self._weight, self._seen = [0] * ways, None, False

    def see(
        self, z: Tensor, gradients: Sequence[Tensor], loss: Tensor, scale: Tensor | float
    ) -> None:
        """Take the loss of outputs z with its gradients by them, both multiplied by `scale`."""
        if self._loss is None:
            return
        known, self._seen = LOSSES[self._loss], True
        self._terms = [a + b for a, b in zip(self._terms, known.terms(z), strict=True)]
        for g in gradients if z.numel() > 0 else ():  # a rank may have no examples
            w = known.weight(z.float(), g.float() / scale, loss / scale)
            self._weight = w if self._weight is None else torch.maximum(self._weight, w)

    def reduce(self) -> None:
        """Add up what the ranks saw."""
        *self._terms, seen = self._ranks.sums([*self._terms, int(self._seen)])
        self._seen = seen > 0

    def check(self, batch_size: int) -> None:
        """Raise RuntimeError where the loss contradicts `batch_size`; all ranks must ask."""
        if not self._seen:
            return
        terms = self._terms
        if batch_size not in (*terms, 1):
            raise RuntimeError(
                f"the loss had {' or '.join(map(str, dict.fromkeys(terms)))} terms, but "
                f"batch_size is {batch_size}. batch_size is the number of terms that the loss "
                "averages, over all micro-batches and ranks, or 1 for a summed loss"
            )
        if batch_size in self._trusted:
            return  # looked at once: reading the scale waits for the device
        here = 0.0 if self._weight is None else float(self._weight)
        # gradients of a rank are those of its own average
        excess = self._ranks.largest(here) * batch_size / self._ranks.divisor
        if excess > _TOLERANCE:
            raise RuntimeError(
                f"batch_size={batch_size} says that the loss is an average, but its gradient is "
                f"at least {excess:.3g} times that of one: average the loss over its "
                f"{terms[0]} terms, or set batch_size=1 for a summed loss"
            )
        self._trusted.add(batch_size)
