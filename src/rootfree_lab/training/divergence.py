"""When a run counts as diverged: one definition for training, comparing and searching."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

# The number of steps whose mean loss is judged; fewer are too noisy.
WINDOW = 20


class Diverged(ArithmeticError):  # noqa: N818 (an outcome)
    """The training loss is no longer a number, or far above what it was."""


def far_above(loss: float, *, first: float, lowest: float) -> bool:
    """Whether a mean loss is far above earlier ones.

    The limit is the loss of the first step plus its magnitude, or plus the amount by which the loss
    has fallen since if that is more. For positive losses it is twice the first loss.
    """
    return loss > first + max(abs(first), first - lowest)


@dataclass
class Losses:
    """The mean losses of a run so far; the sum stays on the device until it is judged."""

    first: Tensor | None = None
    lowest: float = math.inf  # mean of some steps
    sum: Tensor | float = 0.0  # since the last look
    steps: int = 0
    judged: int = 0  # the step of the last look that found nothing

    def count(self, loss: Tensor) -> None:
        """Add a step's loss."""
        # A single loss, not a mean: a run may diverge within its first few steps.
        self.first = loss.detach().double() if self.first is None else self.first
        self.sum = self.sum + loss.detach().double()
        self.steps += 1

    def look(self, done: int) -> None:
        """Raise `Diverged` if the mean loss of the last steps is far above earlier ones."""
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
