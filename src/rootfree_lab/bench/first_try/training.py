"""One run: a task trained with one optimizer from one seed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from rootfree_lab.bench.first_try import entrants
from rootfree_lab.bench.first_try.records import Record
from rootfree_lab.bench.first_try.suite import TASKS, factor
from rootfree_lab.bench.first_try.task import Measured, Setting, Task

WINDOW = 50  # steps that a mean loss is of
_POINTS = 20  # of a curve
_LOOK_EVERY = 100  # steps between two looks at whether the loss is still a number
# A run that ends above its first loss by this factor has diverged, even where it has no NaN.
_WORSE = 1.1


@dataclass(frozen=True)
class Run:
    """What one run is of."""

    task: str
    entrant: entrants.Entrant
    seed: int
    scale: str
    steps: int
    constant: bool
    device: str
    data: Path | None

    @property
    def record(self) -> Record:
        """The record of the run before it has taken place."""
        return Record(
            task=self.task,
            optimizer=self.entrant.name,
            label=self.entrant.label,
            options=self.entrant.effective(),
            seed=self.seed,
            scale=self.scale,
            steps=self.steps,
            constant=self.constant,
            device=self.device,
        )


def train(run: Run) -> Record:
    """Train, measure, and return the record."""
    entry, device = TASKS[run.task], torch.device(run.device)
    torch.manual_seed(run.seed)
    task = entry.build(Setting(run.scale, run.seed, run.steps, device, run.data))
    optimizers = entrants.build(run.entrant, task.model, batch_size=task.batch_size)
    schedule = "constant" if run.constant else entry.schedule
    started = time.perf_counter()
    losses, failure = _losses(task, optimizers, schedule, run.steps, device)
    record = replace(
        run.record,
        batch_size=task.batch_size,
        seconds=round(time.perf_counter() - started, 2),
        failure=failure,
        torch=torch.__version__,
    )
    with torch.no_grad(), _autocast(task, device):
        task.model.eval()
        full = None if task.full_loss is None else float(task.full_loss())
        measured = task.evaluate() if failure is None else Measured(math.nan, None)
    return with_losses(record, losses, full=full, measured=measured)


def with_losses(
    record: Record, losses: Tensor, *, full: float | None, measured: Measured
) -> Record:
    """The record with what the losses of all steps say; `full` replaces the mean of the last."""
    losses = losses.double()
    means = losses.unfold(0, min(WINDOW, len(losses)), 1).mean(1)
    last, first = float(means[-1]), float(losses[0])
    finite = means[means.isfinite()]
    best = float(finite.min()) if len(finite) else math.nan
    final = last if full is None else full
    ends = torch.linspace(0, len(losses), _POINTS + 1).round().long().tolist()
    parts = [(a, b) for a, b in pairwise(ends) if b > a]
    return replace(
        record,
        curve=[(b, _number(float(losses[a:b].mean()))) for a, b in parts],
        first_loss=_number(first),
        final_loss=_number(final),
        best_mean=_number(best),
        late_ratio=_number(last / best) if best > 0 else None,
        test_loss=_number(measured.loss),
        test_error=measured.error,
        diverged=not (math.isfinite(final) and math.isfinite(last) and last <= _WORSE * first),
    )


def _losses(
    task: Task, optimizers: list[Optimizer], schedule: str, steps: int, device: torch.device
) -> tuple[Tensor, str | None]:
    """The loss before each step; NaN from where it is no number, and why training stopped."""
    groups = [(group, group["lr"]) for each in optimizers for group in each.param_groups]
    losses = torch.full((steps,), math.nan, device=device)
    task.model.train()
    for step in range(steps):
        scale = factor(schedule, step, steps)
        for group, lr in groups:
            group["lr"] = lr * scale
        for optimizer in optimizers:
            optimizer.zero_grad()
        with _autocast(task, device):
            loss = task.loss(step)
        loss.backward()
        # Not read here: the host does not wait for the device.
        losses[step] = loss.detach()
        try:
            for optimizer in optimizers:
                optimizer.step()
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            return losses.cpu(), str(error)
        if step % _LOOK_EVERY == _LOOK_EVERY - 1 and not math.isfinite(losses[step].item()):
            break
    return losses.cpu(), None


def _autocast(task: Task, device: torch.device) -> torch.autocast:
    on = task.autocast and device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=on)


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
