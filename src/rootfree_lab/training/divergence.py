"""When a run counts as diverged: one definition for training, comparing and searching."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Steps whose mean loss is looked at: fewer are too noisy.
WINDOW = 20


class Diverged(ArithmeticError):  # noqa: N818 (an outcome)
    """The training loss is no longer a number, or far above what it was."""


def far_above(loss: float, *, first: float, lowest: float) -> bool:
    """Whether a mean loss is far above what it was.

    It exceeds the loss of the first step by as much as that is itself, or by as much as the loss
    has fallen since, whichever is more: it is twice the first loss where losses are positive.
    """
    return loss > first + max(abs(first), first - lowest)


@dataclass
class Losses:
    """The mean losses of a run so far; the sum stays on the device until it is looked at."""

    first: Tensor | None = None
    lowest: float = math.inf  # mean of some steps
    sum: Tensor | float = 0.0  # since the last look
    steps: int = 0
    judged: int = 0  # the step of the last look that found nothing

    def count(self, loss: Tensor) -> None:
        """Add a step's loss."""
        # Not a mean: a run may be lost within its first few steps.
        self.first = loss.detach().double() if self.first is None else self.first
        self.sum = self.sum + loss.detach().double()
        self.steps += 1

    def look(self, done: int) -> None:
        """Raise `Diverged` where the mean of the last steps is far above what it was."""
        if self.first is None or self.steps < WINDOW:
            return
        mean, first = float(self.sum) / self.steps, float(self.first)
        if far_above(mean, first=first, lowest=min(self.lowest, first)):
            raise Diverged(
                f"the training loss by step {done}, {mean:.4g} on average, is far above that of "
                f"the first step, {first:.4g}"
            )
        self.lowest, self.sum, self.steps = min(self.lowest, mean), 0.0, 0
        self.judged = done

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return dict(vars(self))
