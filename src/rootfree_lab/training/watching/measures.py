"""What a run costs: the wall clock split into parts, and memory."""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

PARTS = ("data", "forward", "backward", "optimizer")


class Stopwatch:
    """Seconds of training, in total and by part; evaluation and checkpoints are not training.

    On a GPU a part is measured with events in its stream, which are read when training pauses. No
    step waits for the GPU, so measuring does not slow it down. The seconds of a part then include
    the time in which the GPU idles while the host prepares its work.
    """

    def __init__(self, device: torch.device, *, parts: bool) -> None:
        self.totals: dict[str, float] = dict.fromkeys(("total", *PARTS, "evaluation"), 0.0)
        self._cuda = device if device.type == "cuda" else None
        self._parts = parts
        self._started: float | None = None
        self._events = None if self._cuda is None else _Events(self._cuda)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is inside as one of the parts."""
        if not self._parts:
            yield
        elif self._events is not None:
            with self._events.around(name):
                yield
        else:
            start = time.perf_counter()
            yield
            self.totals[name] += time.perf_counter() - start

    def start(self) -> None:
        """Training begins, or goes on after a pause."""
        self._started = self._now()

    def pause(self) -> None:
        """Training pauses: wait for the work of the GPU, and count it."""
        if self._started is not None:
            self.totals["total"] += self._now() - self._started
            self._started = None
        if self._events is not None:
            for name, seconds in self._events.take():
                self.totals[name] += seconds

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


class _Events:
    """Pairs of CUDA events around parts of a step, read once the GPU has passed them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._read: list[tuple[str, float]] = []

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Record an event before and after what is inside."""
        start = self._record()
        yield
        self._pending.append((name, start, self._record()))
        # Read what the GPU has passed now, so that a few events serve a run of any length.
        while self._pending[0][2].query():
            self._read_first()
            if not self._pending:
                return

    def take(self) -> list[tuple[str, float]]:
        """Names and seconds of all parts since the last call; waits for the GPU."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._read_first()
        read, self._read = self._read, []
        return read

    def _read_first(self) -> None:
        name, start, end = self._pending.popleft()
        self._read.append((name, start.elapsed_time(end) / 1e3))
        self._free += [start, end]

    def _record(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def reset_peak(device: torch.device) -> None:
    """Start measuring the peak anew, so that each of many runs in a process has its own."""
    gc.collect()  # an earlier run is still in memory, as its parts refer to one another
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(OSError):  # where it is not allowed: the peak is that of the process so far
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Peak of the GPU's allocator; on a CPU, peak resident memory of the process, code included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return None


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of the optimizers' state, every tensor once."""
    states = tree_leaves([dict(optimizer.state) for optimizer in optimizers])
    found = {id(t): t.numel() * t.element_size() for t in states if isinstance(t, Tensor)}
    return sum(found.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a run failed because the device or the host ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in said or "ALLOC_FAILED" in said or "can't allocate memory" in said
    )
