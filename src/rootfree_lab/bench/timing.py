"""Timing of steps.

Contenders take turns, so that a slow moment of the machine affects all of them. A turn is a whole
number of periods of T steps, so that refresh steps count as often as they occur. Every step has new
gradients: their sign changes between two steps and their values between two turns, both untimed.
Caches are left as they are, as after a backward pass.

On a GPU a step is the time between two CUDA events. As in a training loop, host and device do not
wait for each other within a turn: if the device is faster than the host can launch, the time is
that of the host. `host_ahead` is the other figure: the steps are launched while the device still
sleeps, so that only the device's own time counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

STEPS_A_TURN = {"cuda": 10, "cpu": 2}
_FEWEST_WARM_UP_STEPS = 4  # a compiled step is compiled twice: without state, and with it
_LONGEST_SLEEP = 0.2  # seconds; a host that needs longer waits for the device
_CYCLES = 2e9  # a second, roughly


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of the samples: milliseconds."""

    median: float
    lower: float
    upper: float
    samples: int


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    lower, middle, upper = (
        quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    )
    return Spread(middle, lower, upper, len(values))


class Gradients:
    """One set of gradients for all contenders, rewritten in place."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)

        def draw() -> list[Tensor]:
            return [
                torch.randn(tuple(s), dtype=torch.float32, device=device, generator=generator)
                .mul_(1e-3)
                .to(dtype)
                for s in shapes
            ]

        self._ends = draw(), draw()
        self.tensors = draw()
        self._turn = 0

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        for p, g in zip(parameters, self.tensors, strict=True):
            p.grad = g

    def turn_sign_(self) -> None:
        """Between steps: one pass."""
        torch._foreach_neg_(self.tensors)

    def renew_(self) -> None:
        """Between turns: g <- cos t · x + sin t · y, as large as before and in a new direction."""
        self._turn += 1
        x, y = self._ends
        torch._foreach_copy_(self.tensors, x)
        torch._foreach_mul_(self.tensors, math.cos(self._turn))
        torch._foreach_add_(self.tensors, y, alpha=math.sin(self._turn))


def time_steps(
    step: Callable[[], object], between: Callable[[], object], n: int, device: torch.device
) -> list[float]:
    """Milliseconds of each of n steps."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    marks = []
    for _ in range(n):
        between()
        marks.append(mark(device))
        step()
        marks.append(mark(device))
    return milliseconds(marks, device)[::2]


def host_ahead(
    step: Callable[[], object], between: Callable[[], object], n: int, device: torch.device
) -> float | None:
    """Mean milliseconds of n steps of the device alone; None where that cannot be seen."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if device.type != "cuda" or sleep is None:
        return None
    host = 0.0  # seconds that handing over a step takes
    for _ in range(n):
        between()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        host = max(host, time.perf_counter() - start)
        if 1.5 * host > _LONGEST_SLEEP:
            return None
    total = 0.0
    for _ in range(n):
        between()
        torch.cuda.synchronize(device)
        sleep(int(_CYCLES * (1.5 * host + 1e-3)))
        first = mark(device)
        step()
        total += sum(milliseconds([first, mark(device)], device))
    return total / n


def mark(device: torch.device) -> Any:
    """A point in time; on a GPU an event of the device, for which nobody waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(marks: Sequence[Any], device: torch.device) -> list[float]:
    """The times between consecutive marks; waits for a GPU."""
    if device.type != "cuda":
        return [1e3 * (b - a) for a, b in pairwise(marks)]
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


@dataclass
class Runner:
    """One contender on the clock: `periods` holds the milliseconds of each step, T at a time."""

    step: Callable[[], object]
    T: int
    gradients: Gradients
    device: torch.device
    periods: list[list[float]] = field(default_factory=list)

    def warm_up(self, seconds: float) -> None:
        """Run whole periods until one is about as fast as the fastest: compilation is done then."""
        fastest = math.inf
        start = time.perf_counter()
        for done in range(1, 11):
            taken = sum(self.period())
            enough = done >= 2 and done * self.T >= _FEWEST_WARM_UP_STEPS
            if enough and (taken < 1.25 * fastest or time.perf_counter() - start > seconds):
                return
            fastest = min(fastest, taken)

    def turn(self) -> None:
        """Enough periods for a turn, into `periods`."""
        self.gradients.renew_()
        n = self.T * -(-STEPS_A_TURN[self.device.type] // self.T)
        times = time_steps(self.step, self.gradients.turn_sign_, n, self.device)
        self.periods += [times[i : i + self.T] for i in range(0, n, self.T)]

    def device_ms(self) -> float | None:
        """Milliseconds a step, over a period, with the host ahead."""
        return host_ahead(self.step, self.gradients.turn_sign_, self.T, self.device)

    def period(self) -> list[float]:
        """Milliseconds of the steps of one period, not kept."""
        return time_steps(self.step, self.gradients.turn_sign_, self.T, self.device)


def amortised(periods: Sequence[Sequence[float]]) -> Spread:
    """Milliseconds a step, every period one sample."""
    return spread([sum(period) / len(period) for period in periods])


def by_kind(periods: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """(refresh, plain): median of the slowest place of a period, and of the other places.

    Optimizers refresh at different places of a period; the refresh is the slowest.
    """
    T = len(periods[0])
    if T == 1:
        return None, None
    places = sorted(median(period[i] for period in periods) for i in range(T))
    return places[-1], median(places[:-1])
