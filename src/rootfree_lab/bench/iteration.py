"""Whole training iterations, split into forward, backward and optimizer.

Every contender has its own copy of the model, and they take turns as in `steps`. Inputs are random,
on the device, and new in every turn. As in training, nothing waits for the device within a turn.
The parts are the times between CUDA events; an iteration is the time from the first to the last,
divided by their number.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rootfree_lab.bench.contenders import Built, Contender
from rootfree_lab.bench.memory import state_bytes, temporary_bytes
from rootfree_lab.bench.model import Batch, build_model
from rootfree_lab.bench.record import IterationRecord, IterationRow, environment
from rootfree_lab.bench.timing import STEPS_A_TURN, mark, milliseconds, spread
from rootfree_lab.bench.turns import Say, Turns

DEFAULT = (
    "torch AdamW fused",
    "torch Muon",
    "RFRMSprop",
    "IFShampoo T=2",
    "IFShampoo T=10",
    "IFShampoo KFAC T=2",
    "sirfshampoo bf16 T=2",
)


@dataclass
class _Trainer:
    """A copy of the model, and its optimizer."""

    contender: Contender
    model: nn.Module
    built: Built
    device: torch.device
    peak: int | None = None
    # of each iteration: before forward, forward, backward, optimizer
    times: list[list[float]] = field(default_factory=list)

    def turn(self, batch: Batch) -> None:
        """Whole periods of iterations; keeps their times."""
        T = self.contender.period
        n = T * -(-STEPS_A_TURN[self.device.type] // T)
        marks: list[Any] = [mark(self.device)]
        for _ in range(n):
            marks += self._iteration(*batch)
        between = milliseconds(marks, self.device)
        self.times += [between[i : i + 4] for i in range(0, len(between), 4)]

    def _iteration(self, x: Tensor, y: Tensor) -> list[Any]:
        """One iteration; marks before forward, after it, after backward and after the step."""
        self.model.zero_grad(set_to_none=True)
        marks = [mark(self.device)]
        cuda = self.device.type == "cuda"
        with self.built.around():
            with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
                scores = self.model(x)
            loss = functional.cross_entropy(scores.float().flatten(0, -2), y.flatten())
            marks.append(mark(self.device))
            loss.backward()  # type: ignore[no-untyped-call]
        marks.append(mark(self.device))
        self.built.step()
        marks.append(mark(self.device))
        return marks

    def means(self, *parts: int) -> list[float]:
        """Of these parts of an iteration: their mean in each of the periods."""
        T = self.contender.period
        values = [sum(times[part] for part in parts) for times in self.times]
        return [sum(values[i : i + T]) / T for i in range(0, len(values), T)]


def measure_iterations(
    contenders: Sequence[Contender],
    model: str,
    *,
    batch: int,
    device: torch.device,
    turns: int,
    seconds: float,
    say: Say = lambda message: None,
) -> IterationRecord:
    """Time training iterations; the first contender is the reference of the ratios."""
    torch.manual_seed(0)
    synthetic = build_model(model, "--iteration")
    synthetic.model.train()
    batches = lru_cache(maxsize=1)(lambda number: synthetic.draw(batch, device))
    rows = Turns(
        IterationRow,
        enter=lambda contender: _enter(contender, synthetic.model, synthetic.draw(batch, device)),
        turn=lambda trainer, number: trainer.turn(batches(number)),
        row=_row, device=device, turns=turns, seconds=seconds, say=say,
    ).rows(contenders)  # fmt: skip
    return IterationRecord(
        model=model,
        count=sum(p.numel() for p in synthetic.model.parameters()),
        batch=batch,
        autocast="bfloat16" if device.type == "cuda" else "off",
        reference=contenders[0].name,
        settings={"turns": turns, "seconds": seconds},
        environment=environment(device),
        rows=[rows[contender.name] for contender in contenders],
    )


def _enter(contender: Contender, model: nn.Module, batch: Batch) -> _Trainer:
    """A trainer after warming up: compilation and the choice of convolutions are done."""
    device = batch[0].device
    own = copy.deepcopy(model).to(device)
    parameters = [p for p in own.parameters() if p.requires_grad]
    built = contender.on_model(own) if contender.on_model else contender.build(parameters)
    trainer = _Trainer(contender, own, built, device)
    trainer.turn(batch)
    held = sum(t.nbytes for p in parameters for t in (p, p.grad) if t is not None)
    held += state_bytes(built.optimizers, parameters)
    temporary = temporary_bytes(lambda: trainer.turn(batch), device)
    trainer.peak = None if temporary is None else held + temporary
    trainer.times = []
    return trainer


def _row(contender: Contender, trainer: _Trainer) -> IterationRow:
    return IterationRow(
        name=contender.name,
        family=contender.family,
        period=contender.period,
        ms=spread(trainer.means(0, 1, 2, 3)),
        forward_ms=median(trainer.means(1)),
        backward_ms=median(trainer.means(2)),
        optimizer_ms=median(trainer.means(3)),
        peak_bytes=trainer.peak,
    )
