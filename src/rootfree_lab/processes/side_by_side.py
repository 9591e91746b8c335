"""A pool of processes that survives the death of a worker and reports it.

A worker calls one function with one piece of work after the other. While it works, it can send the
pool's owner a message, or a question whose answer it waits for. When its owner is gone, a worker
ends as after SIGTERM.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")


class Channel:
    """A worker's connection to the owner of the pool."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def tell(self, message: Any) -> None:
        self._connection.send(("told", message))

    def ask(self, message: Any) -> Any:
        """Send a message and wait for the answer."""
        self._connection.send(("asked", message))
        return self._connection.recv()


Work = Callable[[Any, Channel], Any]


@dataclass(frozen=True)
class Event:
    """An event of a worker: told, asked (answer it), done, or died."""

    kind: str
    item: Any
    content: Any = None  # the message, the result, or why it died


class _Worker:
    def __init__(self, work: Work, threads: int) -> None:
        # A GPU cannot be used after a fork.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(work, theirs, threads), daemon=True)
        self.process.start()
        theirs.close()
        self.item: Any = None
        self.busy = False

    def end(self) -> None:
        self.connection.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Pool:
    """At most `jobs` workers, started when there is work for them."""

    def __init__(self, work: Work, jobs: int) -> None:
        self.jobs = jobs
        self._work = work
        self._threads = max(1, torch.get_num_threads() // jobs)
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            if error[0] is not None:  # nobody needs their results
                worker.process.kill()
            worker.end()
        self._workers = []

    @property
    def running(self) -> list[Any]:
        return [worker.item for worker in self._workers if worker.busy]

    @property
    def free(self) -> int:
        """How many more items could be submitted."""
        return self.jobs - len(self.running)

    def submit(self, item: Any) -> None:
        """Give an item to a free worker."""
        assert self.free, "all workers are busy"
        idle = [worker for worker in self._workers if not worker.busy]
        worker = idle[0] if idle else _Worker(self._work, self._threads)
        if not idle:
            self._workers.append(worker)
        worker.item, worker.busy = item, True
        with suppress(OSError):  # it has died, which `events` will report
            worker.connection.send(item)

    def answer(self, item: Any, content: Any) -> None:
        """Answer the worker of this item, which has asked."""
        worker = next(each for each in self._workers if each.busy and each.item is item)
        with suppress(OSError):
            worker.connection.send(content)

    def retire_idle(self) -> None:
        """End idle workers, which frees all their memory."""
        for worker in [w for w in self._workers if not w.busy]:
            self._workers.remove(worker)
            worker.end()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to all busy workers."""
        for worker in self._workers:
            if worker.busy:
                worker.process.terminate()

    def events(self, seconds: float) -> list[Event]:
        """The events so far; waits at most this long for the first one."""
        busy = {worker.connection: worker for worker in self._workers if worker.busy}
        ready = wait(list(busy), seconds) if busy else []
        return [self._event(busy[each]) for each in ready if isinstance(each, Connection)]

    def _event(self, worker: _Worker) -> Event:
        try:
            kind, content = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            self._workers.remove(worker)
            return Event("died", worker.item, _how(worker.process.exitcode))
        if kind == "done":
            worker.busy = False
        return Event(kind, worker.item, content)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def _serve(work: Work, connection: Any, threads: int) -> None:
    """The main loop of a worker."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C is for the owner, who asks the workers to stop
    threading.Thread(target=_end_with_the_owner, daemon=True).start()
    torch.set_num_threads(threads)
    channel = Channel(connection)
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the owner has closed the connection
        while True:
            connection.send(("done", work(connection.recv(), channel)))
            if torch.cuda.is_initialized():  # other workers may need the memory
                gc.collect()
                torch.cuda.empty_cache()


def _end_with_the_owner() -> None:
    owner = multiprocessing.parent_process()
    if owner is not None:
        wait([owner.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


def each(work: Work, items: Sequence[Item], jobs: int) -> Iterator[tuple[Item, Any]]:
    """Items with their results in the order in which they end, or with why their worker died."""
    waiting = list(items)
    with Pool(work, jobs) as pool:
        while waiting or pool.running:
            while waiting and pool.free:
                pool.submit(waiting.pop(0))
            for event in pool.events(60):
                yield event.item, event.content
