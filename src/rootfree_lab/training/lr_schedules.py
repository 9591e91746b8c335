"""The learning rate over time, as a factor of the one given: a pure function of the step.

A function of the step alone has no state, so a resumed run needs nothing to continue it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.config.settings import Config, ScheduleConfig


@dataclass(frozen=True)
class Schedule:
    """Factor of the learning rate at each step of a run."""

    name: str
    warmup: int  # steps
    ramp: int  # steps from nothing to the full rate
    milestones: tuple[int, ...]  # steps
    factor: float
    final: float
    total: int  # steps

    @classmethod
    def make(cls, config: ScheduleConfig, *, total: int, steps_per_epoch: int) -> Schedule:
        """A schedule in steps from one in epochs."""
        warmup = round(config.warmup_epochs * steps_per_epoch)
        if warmup >= total:
            raise ConfigError(
                f"schedule.warmup_epochs must be shorter than the run of "
                f"{total / steps_per_epoch:g} epochs, got {config.warmup_epochs!r}"
            )
        # The first step has a rate above zero, and the last one of the ramp is just below full.
        ramp = warmup + 1
        if config.warmup_share:
            warmup = ramp = max(1, round(config.warmup_share * total))
        milestones = tuple(round(m * steps_per_epoch) for m in config.milestones)
        return cls(config.name, warmup, ramp, milestones, config.factor, config.final, total)

    def __call__(self, step: int) -> float:
        """The factor at a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.ramp
        if self.name == "step":
            return float(self.factor ** bisect_right(self.milestones, step))
        if self.name == "constant":
            return 1.0
        done = (step - self.warmup) / (self.total - self.warmup)
        left = 1 - done if self.name == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (1 - self.final) * left


def schedule_of(config: Config, *, steps_per_epoch: int) -> Schedule:
    """The schedule of a run; its `total` is the number of steps."""
    train = config.train
    total = train.steps or (train.epochs or 0) * steps_per_epoch
    return Schedule.make(config.schedule, total=total, steps_per_epoch=steps_per_epoch)


def base_rates(optimizers: list[Optimizer]) -> list[list[Any]]:
    """The learning rates as built, for `set_rates`; taken before any checkpoint is loaded."""
    return [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]


def set_rates(optimizers: list[Optimizer], base: list[list[Any]], factor: float) -> None:
    """Set every group's rate to `factor` times its base, in place where it is a tensor."""
    for optimizer, rates in zip(optimizers, base, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor
