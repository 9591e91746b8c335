"""Work recorded once and replayed: which kinds, how many, and what if it cannot be recorded."""

from __future__ import annotations

import gc

import pytest

from rootfree.kernels import replay
from rootfree.kernels.graphs import Replays


class Counting:
    """A recorder that keeps no graph: it counts, and can be made to fail."""

    def __init__(self, error: Exception | None = None):
        self.recorded = self.replayed = self.done = 0
        self.error = error

    def __call__(self, work):
        if self.error is not None:
            raise self.error
        self.recorded += 1

        def again():
            self.replayed += 1

        return again

    def work(self):
        self.done += 1


def run(kinds, **options) -> Counting:
    counting = Counting(**options)
    replays = Replays(counting)
    for kind in kinds:
        replays(kind, counting.work)
    return counting


def test_a_kind_runs_twice_as_usual_and_is_replayed_from_the_third_time_on():
    counts = run(["refresh", "plain"] * 5)
    assert (counts.done, counts.recorded, counts.replayed) == (4, 2, 6)


def test_numbers_that_change_at_every_step_are_never_recorded():
    counts = run(range(200))
    assert (counts.done, counts.recorded) == (200, 0)


def test_what_is_remembered_is_bounded():
    counting = Counting()
    replays = Replays(counting)
    for kind in range(500):
        replays(kind, counting.work)
    assert len(replays._seen) <= replay._MOST_SEEN


def test_the_recording_that_was_not_used_for_longest_leaves():
    counting = Counting()
    replays = Replays(counting)
    for kind in range(replay._MOST + 1):
        for _ in range(3):
            replays(kind, counting.work)
        if kind < replay._MOST:
            replays(0, counting.work)  # in use all the time
    assert len(replays._recorded) == replay._MOST
    assert 0 in replays._recorded
    assert 1 not in replays._recorded


def test_kinds_that_come_and_go_are_not_recorded_for_ever():
    counts = run([kind for _ in range(50) for kind in range(replay._MOST + 1)])
    assert counts.recorded == replay._MOST_RECORDED
    assert counts.done + counts.replayed == 50 * (replay._MOST + 1)


def test_what_cannot_be_recorded_runs_as_usual_with_one_warning():
    with pytest.warns(RuntimeWarning, match="could not be recorded.*no graphs here") as caught:
        counts = run(["plain"] * 6, error=RuntimeError("no graphs here"))
    assert len(caught) == 1
    assert counts.done == 6


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_waits_and_is_then_as_before(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with replay.no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
