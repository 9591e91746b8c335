"""Ctrl-C and SIGTERM: after the first signal, training stops where it can be resumed."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupted(Exception):  # noqa: N818 (not an error)
    """The run was asked to stop, and has saved a checkpoint."""

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped; continue with --resume ({checkpoint})")
        self.checkpoint = checkpoint
        self.exit_code = 128 + signum  # as a shell reports it


class StopSignals:
    """Inside this context SIGINT and SIGTERM are noted; a second signal interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # other threads may not do this
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._old[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        self._old = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signum
