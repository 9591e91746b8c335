"""How ranks meet before their first collective: through the store that connected them.

A rank that shares its parameters waits for the others. One of them may never come, because it was
told to share nothing. In a collective nobody would notice. So each rank leaves a note when it
comes, and when it adds parameters that it shares with nobody. Those who wait read the notes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rootfree.placement.processes import PATIENCE, digest, initialised

_FIRST_PAUSE, _PAUSE = 1e-3, 0.25  # seconds between two looks at the notes; from, to

# Groups of parameters that this process shares with nobody, by what they are, since ranks last met:
# how many it has added, and how many of them it has begun to use.
_alone: Counter[str] = Counter()
_used: Counter[str] = Counter()


class Alone(NamedTuple):
    """What a rank that goes another way leaves for those who wait."""

    about: str = ""  # what parameters it has
    number: int = 0  # of such groups that it shares with nobody
    total: int = 0  # of groups that it shares with nobody
    problem: str | None = None  # why it adds none at all, if it does not

    def is_astray(self) -> bool:
        """Whether this process has not gone that way too."""
        return self.total > _alone.total() or self.number > _alone[self.about]


class Waiting(NamedTuple):
    """What a rank that waits leaves for those who go another way."""

    rank: int
    option: str | None  # `placement`
    used: int  # how many groups of such parameters it uses, and shares with nobody
    meeting: str


def go_alone(about: str, problem: str | None = None) -> bool:
    """Note that this rank adds parameters that it shares with nobody; False: it is the only one.

    `about`: what parameters they are; `problem`: why it adds none at all, if it does not.
    """
    store = _store()
    if store is None:
        return False
    _alone[about] += 1
    note = Alone(about, _alone[about], _alone.total(), problem)
    store.set(_alone_key(torch.distributed.get_rank()), json.dumps(note))
    return True


def missed(about: str) -> str | None:
    """Why the first step with parameters of one's own is wrong: others wait to share such ones.

    `about`: what parameters they are. None: nobody waits.
    """
    store, key = _store(), _waiting_key(about)
    _used[about] += 1
    if store is None or not store.check([key]):
        return None
    waiting = Waiting(*json.loads(store.get(key)))
    if _used[about] <= waiting.used:  # they use this optimizer too, and wait with a later one
        return None
    return _verdict(store, waiting, torch.distributed.get_rank())


class Outcome(NamedTuple):
    """Whether all are here; if not, why it is no use to wait on, or None: they are late."""

    complete: bool
    problem: str | None = None


def meet(ranks: Sequence[int], about: str, option: str | None) -> Outcome:
    """Wait, for a while, until all of the ranks have come. All of them must ask.

    `about`: what parameters they are to share.
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
    begun, pause = time.monotonic(), _FIRST_PAUSE
    while not store.check([meeting]):
        if store.check([verdict]):
            return Outcome(False, store.get(verdict).decode())
        # Not at once: they may have made another optimizer, for themselves, first.
        if time.monotonic() - begun > PATIENCE:
            gone = next((r for r in ranks if _note_of(store, r).is_astray()), None)
            return Outcome(False, None if gone is None else _verdict(store, waiting, gone))
        if pause == _FIRST_PAUSE:
            store.set(note, json.dumps(waiting))
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)
    store.delete_key(note)
    store.delete_key(_alone_key(waiting.rank))
    _alone.clear()
    _used.clear()
    return Outcome(True)


def leave(ranks: Sequence[int]) -> None:
    """Take back that one has come."""
    store, key = _store(), _meetings(ranks)
    if store is not None and store.add(f"{key}/arrived", -1) % len(ranks) == 0:
        store.add(f"{key}/failed", 1)  # the last has left: the next meeting is another one


def _verdict(store: Any, waiting: Waiting, gone: int) -> str:
    """The words for those who wait and those who have gone: of all that are found, the first."""
    problem = _note_of(store, gone).problem
    mine = f"rank {gone}: {problem}" if problem is not None else (
        f"placement: rank {waiting.rank} (placement={waiting.option}) waits to share its "
        f"parameters, rank {gone} (placement=None) has parameters that it shares with nobody. Give "
        "placement=..., or shard the parameters, on all ranks or on none"
    )  # fmt: skip
    found: bytes = store.compare_set(_verdict_key(waiting.meeting), "", mine)
    return found.decode()


def _meetings(ranks: Sequence[int]) -> str:
    return f"rootfree/{digest(tuple(ranks))}"


def _verdict_key(meeting: str) -> str:
    return f"{meeting}/verdict"


def _alone_key(rank: int) -> str:
    return f"rootfree/alone/{rank}"


def _waiting_key(about: str) -> str:
    return f"rootfree/waiting/{about}"


def _note_of(store: Any, rank: int) -> Alone:
    """The last note of a rank that went alone."""
    key = _alone_key(rank)
    return Alone(*json.loads(store.get(key))) if store.check([key]) else Alone()


def _store() -> Any:
    """The store of the processes; None: this one is alone, or they have none."""
    distributed = torch.distributed
    if not initialised() or distributed.get_world_size() == 1:
        return None
    if distributed.get_backend() in ("fake", "mpi"):
        return None
    return distributed.distributed_c10d._get_default_store()
