"""How ranks meet before their first collective: through the store that connected them.

A rank that shares its parameters waits for the others. One of them may never come, because it is
configured to share nothing. A collective would then hang. So each rank leaves a note when it
arrives, and when it adds parameters that it shares with no other rank. Waiting ranks read the
notes.

Ranks with copies of the same parameters, which do not communicate otherwise, compare their
settings by notes too: once, before the first step.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from rootfree.placement.processes import PATIENCE, digest, initialised

_FIRST_PAUSE, _PAUSE = 1e-3, 0.25  # seconds between two looks at the notes; from, to

# Groups of parameters that this process shares with no other, by their description, since ranks
# last met: how many it has added, and how many of them it has begun to use.
_alone: Counter[str] = Counter()
_used: Counter[str] = Counter()


class Alone(NamedTuple):
    """The note of a rank that shares nothing, for ranks that wait."""

    about: str = ""  # the description of its parameters
    number: int = 0  # of its groups with this description
    total: int = 0  # of all its groups that it does not share
    problem: str | None = None  # the error that kept it from adding them, if any

    def is_astray(self) -> bool:
        """Whether that rank has added a group of its own that this process has not."""
        return self.total > _alone.total() or self.number > _alone[self.about]


class Waiting(NamedTuple):
    """The note of a waiting rank, for ranks that share nothing."""

    rank: int
    option: str | None  # `placement`
    used: int  # how many groups with the same description it uses without sharing them
    meeting: str


def go_alone(about: str, problem: str | None = None) -> bool:
    """Note that this rank adds parameters that it does not share; False: there are no others.

    `about`: the description of the parameters; `problem`: the error that keeps it from adding them.
    """
    store = _store()
    if store is None:
        return False
    _alone[about] += 1
    note = Alone(about, _alone[about], _alone.total(), problem)
    store.set(_alone_key(torch.distributed.get_rank()), json.dumps(note))
    return True


def missed(about: str) -> str | None:
    """The error of a first step with unshared parameters that other ranks wait to share.

    `about`: the description of the parameters. None: no rank waits.
    """
    store, key = _store(), _waiting_key(about)
    _used[about] += 1
    if store is None or not store.check([key]):
        return None
    waiting = Waiting(*json.loads(store.get(key)))
    if _used[about] <= waiting.used:  # they have this optimizer too, and wait with a later one
        return None
    return _verdict(store, waiting, torch.distributed.get_rank(), goes_on=False).problem


def forget(about: Sequence[str]) -> None:
    """Remove the notes of ranks that waited to share parameters with these descriptions."""
    store = _store()
    for each in about if store is not None else ():
        store.delete_key(_waiting_key(each))


class Verdict(NamedTuple):
    """Why waiting is of no use."""

    problem: str
    goes_on: bool  # whether the missing rank continues, without an error so far


class Outcome(NamedTuple):
    """Whether all ranks have come; if not, a verdict, or None: some are just late."""

    complete: bool
    verdict: Verdict | None = None


def meet(ranks: Sequence[int], about: str, option: str | None) -> Outcome:
    """Wait, for a while, until all of the ranks have come. All of them must ask.

    `about`: the description of the parameters to share.
    """
    store = _store()
    if store is None or len(ranks) == 1:
        return Outcome(True)
    key = _meetings(ranks)
    number, failed = store.add(f"{key}/arrived", 1), store.add(f"{key}/failed", 0)
    meeting = f"{key}/{-(-number // len(ranks))}/{failed}"
    if number % len(ranks) == 0:
        store.set(meeting, "all")
    waiting = Waiting(torch.distributed.get_rank(), option, _used[about], meeting)
    verdict, note = _verdict_key(meeting), _waiting_key(about)
    for look in _looks():
        if store.check([meeting]):
            break
        if store.check([verdict]):
            return Outcome(False, Verdict(*json.loads(store.get(verdict))))
        if look == 0:
            store.set(note, json.dumps(waiting))
    else:
        # Not earlier: they may first make another optimizer that they do not share.
        gone = next((r for r in ranks if _note_of(store, r).is_astray()), None)
        return Outcome(False, None if gone is None else _verdict(store, waiting, gone))
    store.delete_key(note)
    store.delete_key(_alone_key(waiting.rank))
    _alone.clear()
    _used.clear()
    return Outcome(True)


def leave(ranks: Sequence[int]) -> None:
    """Undo the arrival of this rank."""
    store, key = _store(), _meetings(ranks)
    if store is not None and store.add(f"{key}/arrived", -1) % len(ranks) == 0:
        store.add(f"{key}/failed", 1)  # the last has left: the next meeting gets another key


class Comparison:
    """A comparison of settings between ranks with copies of the same parameters."""

    def __init__(
        self, ranks: Sequence[int], said: Any, difference: Callable[[Any, Any], str | None]
    ) -> None:
        """Publish this rank's settings; all of the ranks must.

        `difference`: describes that between two ranks, each as (rank, said); None: there is none.
        """
        self._store, me = _store(), torch.distributed.get_rank()
        key = f"{_meetings(ranks)}/compared"
        self._all = f"{key}/{self._store.add(f'{key}/by/{me}', 1)}"
        mine = json.dumps((me, said), default=repr)
        first = self._store.compare_set(f"{self._all}/first", "", mine).decode()
        found = difference(json.loads(first), json.loads(mine))
        if found is not None:
            self._store.compare_set(_verdict_key(self._all), "", found)
        if self._store.add(f"{self._all}/arrived", 1) == len(ranks):
            self._store.set(self._all, "all")

    def wait(self) -> bool:
        """Wait, for a while, until all ranks have published, or two were found to differ."""
        return any(self.is_over() for _ in _looks())

    def is_over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.found() is not None or bool(self._store.check([self._all]))

    def found(self) -> str | None:
        """The difference that was found first, the same on all ranks."""
        key = _verdict_key(self._all)
        return self._store.get(key).decode() if self._store.check([key]) else None


def announce(what: str) -> None:
    """Note that this rank is going to do something that all ranks must do; call once each time."""
    store = _store()
    if store is not None:
        me = torch.distributed.get_rank()
        store.set(_announced(what, store.add(_announced(what, 0, me), 1), me), "")


def unannounced(what: str, ranks: Sequence[int]) -> list[int]:
    """Begin what was announced; returns the ranks that have not announced it after a while."""
    store = _store()
    if store is None:
        return []
    number = store.add(_announced(what, -1, torch.distributed.get_rank()), 1)
    keys = {r: _announced(what, number, r) for r in ranks}
    if any(store.check([*keys.values()]) for _ in _looks()):
        return []
    return [r for r, key in keys.items() if not store.check([key])]


def _looks() -> Iterator[int]:
    """Numbers of attempts to read notes, with pauses, until patience ends."""
    begun, pause = time.monotonic(), _FIRST_PAUSE
    for look in count():
        yield look
        if time.monotonic() - begun > PATIENCE:
            return
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)


def _verdict(store: Any, waiting: Waiting, gone: int, *, goes_on: bool = True) -> Verdict:
    """The verdict for waiting and missing ranks; the first one that is stored counts for all."""
    problem = _note_of(store, gone).problem
    words = f"rank {gone}: {problem}" if problem is not None else (
        f"placement: rank {waiting.rank} (placement={waiting.option}) waits to share its "
        f"parameters, rank {gone} (placement=None) has parameters that it shares with nobody. Give "
        "placement=..., or shard the parameters, on all ranks or on none"
    )  # fmt: skip
    mine = json.dumps(Verdict(words, goes_on and problem is None))
    return Verdict(*json.loads(store.compare_set(_verdict_key(waiting.meeting), "", mine)))


def _meetings(ranks: Sequence[int]) -> str:
    return f"rootfree/{digest(tuple(ranks))}"


def _verdict_key(meeting: str) -> str:
    return f"{meeting}/verdict"


def _alone_key(rank: int) -> str:
    return f"rootfree/alone/{rank}"


def _waiting_key(about: str) -> str:
    return f"rootfree/waiting/{about}"


def _announced(what: str, number: int, rank: int) -> str:
    """The key of one announcement; the numbers 0 and -1 count announcements and their uses."""
    return f"rootfree/announced/{what}/{number}/{rank}"


def _note_of(store: Any, rank: int) -> Alone:
    """The last note of a rank that shares nothing."""
    key = _alone_key(rank)
    return Alone(*json.loads(store.get(key))) if store.check([key]) else Alone()


def has_store() -> bool:
    """Whether ranks have a store for notes."""
    return _store() is not None


def _store() -> Any:
    """The store of the processes; None: there is only one, or no store."""
    distributed = torch.distributed
    if not initialised() or distributed.get_world_size() == 1:
        return None
    if distributed.get_backend() in ("fake", "mpi"):
        return None
    return distributed.distributed_c10d._get_default_store()
