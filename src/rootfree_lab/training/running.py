"""Sums over the steps since the last point of a curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rootfree_lab.training.losses import count_correct
from rootfree_lab.training.parallel import Ranks


@dataclass
class Running:
    """Losses and correct answers, kept on the device so that no step waits for them."""

    loss: Tensor
    correct: Tensor
    terms: int = 0
    steps: int = 0

    @classmethod
    def zero(cls, device: torch.device) -> Running:
        return cls(
            torch.zeros((), dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )

    @classmethod
    def restored(cls, state: dict[str, Any], device: torch.device, ranks: Ranks) -> Running:
        """The sums that `state` returned; sums over all ranks are restored on the first alone."""
        loss, correct = state["loss"].to(device), state["correct"].to(device)
        count, steps = state["counts"]
        if not ranks.first:
            correct, count = torch.zeros_like(correct), 0
        return cls(loss, correct, count, steps)

    def state(self) -> dict[str, Any]:
        """The sums as a checkpoint has them."""
        return {"loss": self.loss, "correct": self.correct, "counts": [self.terms, self.steps]}

    def count(self, loss: Tensor, outputs: Tensor, target: Tensor | None) -> None:
        """Add a step; without a target, only its loss."""
        self.loss += loss
        self.steps += 1
        if target is not None:
            self.correct += count_correct(outputs, target)
            self.terms += target.numel()

    def of_all(self, ranks: Ranks) -> Running:
        """The mean loss of all ranks, and the sums of the rest. All ranks must call this."""
        if ranks.alone:
            return self
        loss, correct = self.loss / ranks.world, self.correct.clone()
        count = torch.tensor(self.terms, device=loss.device)
        ranks.add_up_(loss, correct, count)
        return Running(loss, correct, int(count), self.steps)

    def mean_loss(self) -> float:
        return self.loss.item() / max(self.steps, 1)

    def accuracy(self) -> float | None:
        """The fraction of correct answers in training; None: nothing was counted."""
        return self.correct.item() / self.terms if self.terms else None
