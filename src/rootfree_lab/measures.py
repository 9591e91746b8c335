"""What a run costs: the wall clock split into parts, and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

PARTS = ("data", "forward", "backward", "optimizer")


class Stopwatch:
    """Seconds of training, in total and by part; evaluation and checkpoints are not training.

    With `parts` off a GPU is never waited for inside a step, and only the total is known.
    """

    def __init__(self, device: torch.device, *, parts: bool) -> None:
        self.totals: dict[str, float] = dict.fromkeys(("total", *PARTS, "evaluation"), 0.0)
        self._cuda = device if device.type == "cuda" else None
        self._parts = parts
        self._started: float | None = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is inside as one of the parts."""
        if not self._parts:
            yield
            return
        start = self._now()
        yield
        self.totals[name] += self._now() - start

    def start(self) -> None:
        """Training begins, or goes on after a pause."""
        self._started = self._now()

    def pause(self) -> None:
        """Training pauses: what was handed to the GPU is waited for and counted."""
        if self._started is not None:
            self.totals["total"] += self._now() - self._started
            self._started = None

    @contextmanager
    def paused(self, count_as: str | None = None) -> Iterator[None]:
        """Something that is not training: evaluation, a checkpoint."""
        self.pause()
        start = time.perf_counter()
        yield
        if count_as is not None:
            self.totals[count_as] += self._now() - start
        self.start()

    def as_record(self) -> dict[str, float | None]:
        """The totals; parts that were not measured are null."""
        unknown = () if self._parts else PARTS
        return {name: None if name in unknown else t for name, t in self.totals.items()}

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()


def reset_peak(device: torch.device) -> None:
    """Start measuring the peak anew, so that one run of many in a process has its own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(OSError):  # where it is not allowed: the peak is that of the process so far
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Peak of the GPU's allocator; on the CPU the process's resident memory, code included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return None


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of the optimizers' state, every tensor once."""
    found = {
        id(t): t.numel() * t.element_size()
        for optimizer in optimizers
        for t in _tensors(optimizer.state)
    }
    return sum(found.values())


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
