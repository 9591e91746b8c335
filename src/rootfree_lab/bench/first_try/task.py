"""What a task is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Setting:
    """What a task is built for."""

    scale: str  # "small" | "full"
    seed: int
    steps: int
    device: torch.device
    data: Path | None

    @property
    def full(self) -> bool:
        return self.scale == "full"

    def generator(self) -> torch.Generator:
        """Of the batches: the same ones on every device and for every optimizer."""
        return torch.Generator().manual_seed(1000 + self.seed)


@dataclass(frozen=True)
class Measured:
    """On data that was not trained on; the error is a share, None where there are no classes."""

    loss: float
    error: float | None


@dataclass(frozen=True)
class Task:
    """A model, freshly initialised on the device, and how it is trained and measured."""

    model: nn.Module
    loss: Callable[[int], Tensor]  # of the batch of a step
    batch_size: int  # B, the number of terms that the loss averages
    evaluate: Callable[[], Measured]
    full_loss: Callable[[], Tensor] | None = None  # of all training data, for convex tasks
    autocast: bool = False  # bf16 on a GPU


def batch_indices(setting: Setting, count: int, batch: int) -> Tensor:
    """Which examples each step takes, (steps, batch): a new order in every epoch, drawn up front.

    No batch reaches over the end of an epoch.
    """
    generator, per_epoch = setting.generator(), count // batch
    epochs = -(-setting.steps // per_epoch)
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    rows = torch.cat([order[: per_epoch * batch].view(per_epoch, batch) for order in orders])
    return rows[: setting.steps].to(setting.device)


def classified(scores: Tensor, y: Tensor) -> Measured:
    """Cross entropy and share of errors."""
    scores = scores.float()
    loss = nn.functional.cross_entropy(scores, y)
    return Measured(float(loss), float((scores.argmax(-1) != y).float().mean()))
