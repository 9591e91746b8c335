"""The loop of a search: claim, hand to a process, note what comes back, until nothing is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rootfree_lab.files.durable import NotWritten
from rootfree_lab.files.records import append_missing
from rootfree_lab.processes.side_by_side import Event, Pool
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.search.ledger import Ledger
from rootfree_lab.search.outcomes import DIED, ERROR, FULL, INTERRUPTED, MEMORY
from rootfree_lab.search.settings import Claim
from rootfree_lab.search.storage import patiently
from rootfree_lab.search.trials import Told, carry_out
from rootfree_lab.training.run import records_path

_BEAT = 30.0  # seconds between signs of life
_LOOK = 1.0  # seconds between looks at the signals
_OTHERS = 5.0  # seconds between looks at what other machines do

#: Called with a trial, what it did (began, point, ended, failed, stopped), and the details.
Say = Callable[[Claim, str, Any], None]


def search(ledger: Ledger, *, out: Path, jobs: int, stop: StopSignals, say: Say) -> None:
    """Carry out every trial that nobody has carried out; raises `Interrupted` where asked to stop.

    A trial that has no memory beside others, or whose process died, is tried once more alone.
    """
    with Pool(carry_out, jobs) as pool, _beating(ledger):
        loop = _Loop(ledger, pool, out, say, stop)
        asked = False
        while True:
            if stop.received is None:
                loop.fill()
            elif not asked:
                asked = True
                pool.ask_to_stop()
            if not pool.running:
                if stop.received is not None:
                    raise Interrupted(stop.received, None)
                if patiently(ledger.finished):
                    return
                time.sleep(_OTHERS)  # other processes have the rest
            for event in pool.events(_LOOK):
                loop.handle(event)


class _Loop:
    def __init__(self, ledger: Ledger, pool: Pool, out: Path, say: Say, stop: StopSignals) -> None:
        self._ledger, self._pool, self._out, self._say, self._stop = ledger, pool, out, say, stop

    def fill(self) -> None:
        """Give every free process a trial, unless one has to be alone."""
        alone = self._pool.jobs == 1
        while self._pool.free and not any(claim.alone for claim, _ in self._pool.running):
            claim = patiently(partial(self._ledger.claim, alone=alone))
            if claim is None and not self._pool.running and not alone:
                claim = patiently(partial(self._ledger.claim, alone=True, crowded_out=True))
                if claim is not None:
                    self._pool.retire_idle()  # alone with all the memory
            if claim is None:
                return
            self._pool.submit((claim, self._out))
            self._say(claim, "began", None)

    def handle(self, event: Event) -> None:
        """Note what a trial's process did."""
        claim: Claim = event.item[0]
        if event.kind == "asked" and isinstance(event.content, Told):
            told = event.content
            report = partial(self._ledger.report, claim, told.step, told.total, told.point)
            self._pool.answer(event.item, patiently(report))
            self._say(claim, "point", told)
        elif event.kind == "asked":
            # In the storage before the process lets go of its checkpoint.
            kept = patiently(partial(self._ledger.conclude, claim, event.content))
            self._pool.answer(event.item, None)
            if kept:
                append_missing(records_path(self._out), [event.content])
                self._say(claim, "ended", event.content)
            else:
                self._say(claim, "failed", "another process had taken it for dead and has it now")
        elif event.kind == "died":
            # Asked to stop before it could listen, a process just ends.
            stopped = self._stop.received is not None
            self._fail(claim, INTERRUPTED if stopped else DIED, str(event.content))
        elif event.content.kind or claim.id in self._ledger.claims:
            if event.content.kind == MEMORY:
                self._pool.retire_idle()  # the one that failed among them
            # Without a kind the trial has handed its record over, and is no claim any more.
            message = event.content.message or "it ended without a record"
            self._fail(claim, event.content.kind or ERROR, message)
            if event.content.kind == FULL:
                raise NotWritten(event.content.message)

    def _fail(self, claim: Claim, outcome: str, message: str) -> None:
        patiently(partial(self._ledger.fail, claim, outcome, message))
        if outcome == INTERRUPTED:
            self._say(claim, "stopped", None)
        else:
            status = next(
                s for s in self._ledger.statuses(claim.slot.label) if s.slot == claim.slot
            )
            more = status.needs_to_be_alone and not status.ended
            again = "; it will be tried again, alone" if more else ""
            self._say(claim, "failed", message + again)


@contextmanager
def _beating(ledger: Ledger) -> Iterator[None]:
    """Give signs of life meanwhile; a storage that does not answer is asked again later."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT):
            try:
                ledger.beat()
            except Exception:  # the loop will meet the same trouble, and says so
                continue

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
