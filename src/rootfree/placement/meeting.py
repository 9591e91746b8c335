"""How ranks meet before their first collective: through the store that connected them.

A rank that shares its parameters waits for the others. One of them may never come, because it was
told to share nothing. In a collective nobody would notice. So each rank leaves a note when it
comes, and when it adds parameters that it shares with nobody. Those who wait read the notes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rootfree.placement.processes import digest, initialised

# Seconds after which a rank that waits believes those who seem to have gone another way. They may
# have made another optimizer for themselves first.
PATIENCE = 20.0

_FIRST_PAUSE, _PAUSE = 1e-3, 0.25  # seconds between two looks at the notes; from, to


class _Alone:
    """How many groups of parameters this process has added that it shares with nobody."""

    count = 0


class Waiting(NamedTuple):
    """What a rank that waits leaves for those who go another way."""

    rank: int
    option: str | None  # `placement`
    alone: int  # its own number of groups that it shares with nobody
    meeting: str


def go_alone(problem: str | None = None) -> int:
    """Note that this rank adds parameters that it shares with nobody; the number of the note.

    `problem`: why it adds none at all, if it does not.
    """
    store = _store()
    if store is None:
        return 0
    _Alone.count += 1
    store.set(_alone_key(torch.distributed.get_rank()), json.dumps([_Alone.count, problem]))
    return _Alone.count


def missed(about: str, number: int) -> str | None:
    """Why a step by oneself is wrong: others wait to share the same parameters; None: nobody does.

    `about`: what parameters they are; `number`: that of the note that they are shared with nobody.
    """
    store, key = _store(), _waiting_key(about)
    if store is None or not store.check([key]):
        return None
    waiting = Waiting(*json.loads(store.get(key)))
    if number <= waiting.alone:  # they have made this optimizer too, and wait with a later one
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
    key = f"rootfree/{digest(tuple(ranks))}"
    number = store.add(_arrivals(key), 1)
    meeting = f"{key}/{-(-number // len(ranks))}"
    if number % len(ranks) == 0:
        store.set(meeting, "all")
    waiting = Waiting(torch.distributed.get_rank(), option, _Alone.count, meeting)
    verdict, note = _verdict_key(meeting), _waiting_key(about)
    begun, pause = time.monotonic(), _FIRST_PAUSE
    while not store.check([meeting]):
        if store.check([verdict]):
            return Outcome(False, store.get(verdict).decode())
        if time.monotonic() - begun > PATIENCE:
            gone = next((r for r in ranks if _note_of(store, r)[0] > _Alone.count), None)
            return Outcome(False, None if gone is None else _verdict(store, waiting, gone))
        if pause == _FIRST_PAUSE:
            store.set(note, json.dumps(waiting))
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)
    store.delete_key(note)
    return Outcome(True)


def leave(ranks: Sequence[int]) -> None:
    """Take back that one has come."""
    store = _store()
    if store is not None:
        store.add(_arrivals(f"rootfree/{digest(tuple(ranks))}"), -1)


def _verdict(store: Any, waiting: Waiting, gone: int) -> str:
    """The words for those who wait and those who have gone: of all that are found, the first."""
    _, problem = _note_of(store, gone)
    mine = f"rank {gone}: {problem}" if problem is not None else (
        f"placement must be the same on all ranks, got {waiting.option!r} on rank {waiting.rank} "
        f"and None on rank {gone}: the former waits to share its parameters, the latter has "
        "parameters of its own. Give placement=..., or shard the parameters, on all ranks or on "
        "none"
    )  # fmt: skip
    found: bytes = store.compare_set(_verdict_key(waiting.meeting), "", mine)
    return found.decode()


def _arrivals(key: str) -> str:
    return f"{key}/arrived"


def _verdict_key(meeting: str) -> str:
    return f"{meeting}/verdict"


def _alone_key(rank: int) -> str:
    return f"rootfree/alone/{rank}"


def _waiting_key(about: str) -> str:
    return f"rootfree/waiting/{digest(about)}"


def _note_of(store: Any, rank: int) -> tuple[int, str | None]:
    """The number of the last note of a rank that went alone, and its problem, if it had one."""
    key = _alone_key(rank)
    number, problem = json.loads(store.get(key)) if store.check([key]) else (0, None)
    return number, problem


def _store() -> Any:
    """The store of the processes; None: this one is alone, or they have none."""
    distributed = torch.distributed
    if not initialised() or distributed.get_world_size() == 1:
        return None
    if distributed.get_backend() in ("fake", "mpi"):
        return None
    return distributed.distributed_c10d._get_default_store()
