"""One trial in its process: trained as any run is, each point of its curve told to the search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rootfree_lab.files import checkpoints
from rootfree_lab.files.durable import NotWritten
from rootfree_lab.files.records import Record
from rootfree_lab.processes.side_by_side import Channel
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.search.outcomes import ERROR, FULL, INTERRUPTED, MEMORY, PRUNED
from rootfree_lab.search.settings import Claim
from rootfree_lab.training.run import train_or_resume
from rootfree_lab.training.session import Point, Session
from rootfree_lab.training.watching.measures import is_out_of_memory
from rootfree_lab.training.watching.progress import Watcher


@dataclass(frozen=True)
class Told:
    """A point of a trial's curve."""

    step: int
    total: int
    point: Point


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; a kind of "" says that its record was handed over."""

    kind: str = ""
    message: str = ""


class GivenUp(Exception):  # noqa: N818 (an outcome)
    """The search does not want the rest of the trial."""


class _Teller(Watcher):
    """Tells the search each point, and stops where it is told to."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.pruned: Record | None = None

    def point(self, session: Session, point: Point) -> None:
        with session.watch.paused():  # the search may be busy: not the trial's time
            answer = self._channel.ask(Told(session.done, session.total, point))
        if answer == "go on" or (answer == "prune" and session.done == session.total):
            return
        if answer == "prune":
            session.watch.pause()
            why = {"kind": PRUNED, "message": f"among the worst by step {session.done}"}
            self.pruned = {**session.record(completed=False), "failure": why}
        raise GivenUp(answer)


def carry_out(task: tuple[Claim, Path], channel: Channel) -> Outcome:
    """Train a trial, from its checkpoint where there is one; what fails is told, not raised.

    `task` is the trial and the folder for its files.
    """
    claim, out = task
    teller = _Teller(channel)
    with StopSignals() as stop:
        try:
            train_or_resume(claim.config, out=out, stop=stop, watchers=[teller], keep=channel.ask)
        except GivenUp as given_up:
            if teller.pruned is None:
                return Outcome(INTERRUPTED, str(given_up))
            channel.ask(teller.pruned)
            checkpoints.remove(checkpoints.checkpoint_path(out, claim.config))
        except Interrupted as stopped:
            return Outcome(INTERRUPTED, str(stopped))
        except NotWritten as error:
            return Outcome(FULL, str(error))
        except (EOFError, OSError):  # the search is gone
            raise
        except Exception as error:  # whatever it is, the other trials are still wanted
            kind = MEMORY if is_out_of_memory(error) else ERROR
            first = str(error).strip().partition("\n")[0]
            return Outcome(kind, f"{type(error).__name__}: {first}")
    return Outcome()
