"""Launches on memory that stays, recorded once and replayed: one launch in place of hundreds.

A convolutional network has many shapes, each a dozen launches a refresh, and the host needs several
times longer for them than the device. What lies between the gathered gradients and the tail reads
and writes nothing but memory of the optimizer's own, so it can be recorded without any demand on
the user's tensors.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

Work = Callable[[], None]

# Kinds of work run as usual so many times before they are recorded, so that numbers which change
# at every step (a scheduled precond_lr, a counted batch size) cost nothing.
_FIRST = 2
# Recordings that are kept, and made at all: beyond that, numbers change too often to be worth it.
_MOST = 4
_MOST_RECORDED = 16
_MOST_SEEN = 64


class Replays:
    """Runs work of a few kinds, each recorded when it comes for the third time.

    `record` turns work into a function that does it again: a `Recorder`, but for tests.
    """

    def __init__(self, record: Callable[[Work], Work]) -> None:
        self._record = record
        self._seen: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, Work] = {}
        self._recordings_left = _MOST_RECORDED

    def __call__(self, kind: Hashable, work: Work) -> None:
        """Do `work`; `kind` must tell apart what differs in anything but contents of tensors."""
        replay = self._recorded.pop(kind, None)
        if replay is None:
            replay = self._newly_recorded(kind, work)
        if replay is None:
            work()
        else:
            self._recorded[kind] = replay  # the last to leave
            replay()

    def _newly_recorded(self, kind: Hashable, work: Work) -> Work | None:
        count = self._seen[kind] = self._seen.pop(kind, 0) + 1
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        if count <= _FIRST or not self._recordings_left:
            return None
        self._recordings_left -= 1
        if len(self._recorded) == _MOST:
            del self._recorded[next(iter(self._recorded))]
        try:
            return self._record(work)
        except RuntimeError as error:
            # Nothing ran while it was recorded, so nothing is half done.
            self._recordings_left = 0
            warnings.warn(
                f"the step could not be recorded in a CUDA graph ({error}); it runs without",
                RuntimeWarning,
                stacklevel=2,
            )
            return None


class Recorder:
    """Records in CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        there = _capturing_stream(here.device)
        there.wait_stream(here)
        with torch.cuda.stream(there), no_collection():
            # Other threads (a data loader's, a collective's) may go on as they like.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        here.wait_stream(there)
        return graph.replay


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: a graph that went then would spoil the one being recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
