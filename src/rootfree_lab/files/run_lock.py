"""A lock, so that only one of several processes with one output folder trains a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from filelock import FileLock, Timeout

from rootfree_lab.config.settings import Config
from rootfree_lab.files.checkpoints import file_name
from rootfree_lab.files.durable import in_words
from rootfree_lab.processes.stopping import Interrupted, StopSignals

# Between checks for a signal while waiting.
_SECONDS = 0.2


@contextmanager
def alone(
    out: Path, config: Config, stop: StopSignals | None = None, *, waits: bool = True
) -> Iterator[bool]:
    """Be the only process that trains a run; whether it had to wait for another one.

    The system releases the lock of a process that dies. Raises `filelock.Timeout` if another
    process has the lock and this one does not wait.
    """
    path = out / "locks" / f"{file_name(config)}.lock"
    waited = False
    with in_words(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
    while True:
        try:
            with in_words(path):
                lock.acquire(timeout=_SECONDS if waited else 0)
            break
        except Timeout:
            if not waits:
                raise
            if stop is not None and stop.received is not None:
                raise Interrupted(stop.received, None) from None
            if not waited:
                waited = True
                said = f"another process trains {config.label}, seed {config.train.seed}: waiting"
                typer.echo(said, err=True)
    try:
        yield waited
    finally:
        lock.release()
