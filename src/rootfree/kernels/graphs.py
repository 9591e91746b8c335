"""Work recorded in CUDA graphs and replayed: one launch instead of hundreds.

A convolutional network has many shapes, and a refresh takes a dozen launches for each. The host
needs several times longer for them than the device.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

Task = Callable[[], Any]

# How many recordings are kept, how many are made at all, and how many kinds are remembered: beyond
# that, kinds change too often to be worth recording.
_MOST = 4
_MOST_RECORDED = 16
_MOST_SEEN = 64
# How many works run at the same time, and the number of elements below which that pays.
_BRANCHES = 6
_SMALL, _SMALL_IN_GRAPH = 2**21, 2**24


class Recordings:
    """Runs work of a few kinds, and records each kind after `first` ordinary runs.

    The ordinary runs do what a recording cannot contain, such as compiling, and keep kinds that
    change at every step from being recorded. `record` turns work into a function that does it
    again: a `GraphRecorder`, except in tests. If `limited`, the number of recordings is limited,
    and a failed recording is a warning: the work then runs as usual.
    """

    def __init__(
        self, record: Callable[[Task], Task] | None = None, *, first: int = 2, limited: bool = True
    ) -> None:
        self._record = record
        self._first = first
        self._limited = limited
        self._left = _MOST_RECORDED
        self._seen: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, tuple[Task, Any]] = {}

    def __call__(
        self, kind: Hashable, work: Task, *, held: Any = None, record: Task | None = None
    ) -> bool:
        """Do `work`; whether it was replayed.

        `kind` must distinguish work that differs in anything but the contents of tensors. `held`
        lives as long as the recording: objects whose identity is in the kind, memory that the graph
        uses. `record`: what is recorded, if not `work` itself.
        """
        found = self._recorded.pop(kind, None)
        if found is None:
            replay = self._newly_recorded(kind, record or work)
            if replay is None:
                work()
                return False
            found = (replay, held)
        self._recorded[kind] = found  # most recently used: dropped last
        found[0]()
        return True

    def held(self, kind: Hashable) -> Any:
        """The `held` of the recording of this kind; None: there is no recording."""
        return self._recorded[kind][1] if kind in self._recorded else None

    def release(self) -> None:
        """Drop all recordings; kinds that come again are recorded again."""
        self._recorded.clear()
        self._seen.clear()
        self._left = _MOST_RECORDED

    def _newly_recorded(self, kind: Hashable, work: Task) -> Task | None:
        count = self._seen[kind] = self._seen.pop(kind, 0) + 1
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        if count <= self._first or not self._left:
            return None
        self._left -= self._limited
        if len(self._recorded) == _MOST:
            oldest = next(iter(self._recorded))
            del self._recorded[oldest]
            self._seen.pop(oldest, None)  # it runs as usual before it is recorded again
        if self._record is None:
            self._record = GraphRecorder()
        try:
            return self._record(work)
        except RuntimeError as error:
            if not self._limited:
                raise
            # Recording runs nothing, so nothing is half done.
            self._left = 0
            warnings.warn(
                f"the step could not be recorded in a CUDA graph ({error}); it runs without",
                RuntimeWarning,
                stacklevel=2,
            )
            return None


class GraphRecorder:
    """Records CUDA graphs; they share a pool of memory, as they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, work: Task) -> Task:
        if not self._graphs:  # torch frees a pool with the last graph that uses it
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        there, *_ = _streams(here.device)
        there.wait_stream(here)
        with torch.cuda.stream(there), no_collection():
            # Other threads, of a data loader or a collective, may use CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        here.wait_stream(there)
        self._graphs.add(graph)
        return graph.replay


def side_by_side(works: Sequence[tuple[int, Task]], device: torch.device) -> None:
    """Do independent works, given with their numbers of elements, at the same time where it pays.

    Small works would leave most of the device idle, so they run on branch streams, beside each
    other and the large works. Large works stay on the current stream, and so does their memory. In
    a recording, where branches are part of the graph, more works count as small.
    """
    here: list[Task] = []
    beside: list[Task] = []
    if device.type == "cuda" and len(works) > 1:
        limit = _SMALL_IN_GRAPH if torch.cuda.is_current_stream_capturing() else _SMALL
        for elements, work in works:
            (beside if elements < limit else here).append(work)
    else:
        here = [work for _, work in works]
    branches = _streams(device)[1 : 1 + len(beside)] if beside else []
    for branch in branches:
        branch.wait_stream(torch.cuda.current_stream())
    for i, work in enumerate(beside):
        with torch.cuda.stream(branches[i % len(branches)]):
            work()
    for work in here:
        work()
    for branch in branches:
        torch.cuda.current_stream().wait_stream(branch)


@contextmanager
def no_collection() -> Iterator[None]:
    """Prevent garbage collection inside: destroying a graph would break the one being recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """A stream to record on, and its branches."""
    streams = [torch.cuda.Stream(device) for _ in range(1 + _BRANCHES)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda.current_blas_handle()  # now, so that its memory is not part of a recording
    return streams
