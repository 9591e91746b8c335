"""Work recorded once and replayed: which kinds, how many, and what if it cannot be recorded."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import rootfree
from conformance.curvatures import FromGradients
from kernels.devices import normal
from rootfree.kernels import graphs
from rootfree.kernels.graphs import Recordings


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
    recordings = Recordings(counting)
    for kind in kinds:
        recordings(kind, counting.work)
    return counting


def test_a_kind_runs_twice_as_usual_and_is_replayed_from_the_third_time_on():
    counts = run(["refresh", "plain"] * 5)
    assert (counts.done, counts.recorded, counts.replayed) == (4, 2, 6)


def test_the_usual_runs_before_a_recording_may_be_fewer():
    """As in a GraphedStep, which records as often as it is asked to."""
    counting = Counting()
    recordings = Recordings(counting, first=1, limited=False)
    seen = [recordings(kind, counting.work) for kind in ["refresh", "plain"] * 3]
    assert seen == [False, False, True, True, True, True]
    for kind in range(3 * graphs._MOST_RECORDED):
        assert [recordings(kind, counting.work) for _ in range(2)] == [False, True]
    assert counting.recorded == 2 + 3 * graphs._MOST_RECORDED


def test_what_is_recorded_may_be_other_than_what_runs():
    counting, recorded = Counting(), []
    recordings = Recordings(lambda work: (recorded.append(work), counting(work))[1], first=1)

    def other():
        raise AssertionError("the recorder decides whether it runs")

    for _ in range(2):
        recordings("plain", counting.work, record=other)
    assert recorded == [other]
    assert (counting.done, counting.replayed) == (1, 1)


def test_what_a_recording_needs_lives_with_it():
    class Thing:
        pass

    thing, counting = Thing(), Counting()
    alive = weakref.ref(thing)
    recordings = Recordings(counting)
    for _ in range(3):
        assert recordings.held("plain") is None
        recordings("plain", counting.work, held=thing)
    assert recordings.held("plain") is thing
    del thing
    gc.collect()
    assert alive() is recordings.held("plain")
    recordings.release()
    gc.collect()
    assert alive() is None
    assert recordings.held("plain") is None


def test_after_a_release_kinds_are_recorded_anew():
    counting = Counting()
    recordings = Recordings(counting)
    for round_ in range(1, 4):
        seen = [recordings("plain", counting.work) for _ in range(4)]
        assert seen == [False, False, True, True]
        assert counting.recorded == round_
        recordings.release()
    for kind in range(2 * graphs._MOST_RECORDED):  # as many as may be made at all
        for _ in range(3):
            recordings(kind, counting.work)
    assert counting.recorded == 3 + graphs._MOST_RECORDED
    recordings.release()
    assert [recordings("plain", counting.work) for _ in range(3)] == [False, False, True]


def test_where_recordings_were_asked_for_a_failure_is_an_error():
    counting = Counting(RuntimeError("no graphs here"))
    recordings = Recordings(counting, first=1, limited=False)
    recordings("plain", counting.work)
    with pytest.raises(RuntimeError, match="no graphs here"):
        recordings("plain", counting.work)
    assert counting.done == 1


def test_numbers_that_change_at_every_step_are_never_recorded():
    counts = run(range(200))
    assert (counts.done, counts.recorded) == (200, 0)


def test_what_is_remembered_is_bounded():
    counting = Counting()
    recordings = Recordings(counting)
    for kind in range(500):
        recordings(kind, counting.work)
    assert len(recordings._seen) <= graphs._MOST_SEEN


def test_the_recording_that_was_not_used_for_longest_leaves():
    counting = Counting()
    recordings = Recordings(counting)
    for kind in range(graphs._MOST + 1):
        for _ in range(3):
            recordings(kind, counting.work)
        if kind < graphs._MOST:
            recordings(0, counting.work)  # in use all the time
    assert len(recordings._recorded) == graphs._MOST
    assert 0 in recordings._recorded
    assert 1 not in recordings._recorded


def test_a_kind_that_left_runs_as_usual_before_it_is_recorded_again():
    """Tables of addresses have room for a few recordings between usual runs."""
    counting = Counting()
    recordings = Recordings(counting, first=1, limited=False)
    order = []
    for kind in [*range(graphs._MOST + 1)] * 8:
        before = counting.recorded
        recordings(kind, counting.work)
        order.append((kind, "recorded" if counting.recorded > before else "other"))
    mine = [what for kind, what in order if kind == 0]
    assert mine.count("recorded") > 1
    for i, what in enumerate(mine[1:], start=1):
        assert what == "other" or mine[i - 1] == "other"


def test_kinds_that_come_and_go_are_not_recorded_for_ever():
    counts = run([kind for _ in range(50) for kind in range(graphs._MOST + 1)])
    assert counts.recorded == graphs._MOST_RECORDED
    assert counts.done + counts.replayed == 50 * (graphs._MOST + 1)


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
        with graphs.no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


# -- optimizers ------------------------------------------------------------------------------


class Frozen:
    """Records as a graph does: a replay has the numbers in it that the host knew when recording."""

    def __init__(self) -> None:
        self.optimizer, self.recorded = None, 0

    def __call__(self, work):
        self.recorded += 1
        groups = self.optimizer.param_groups
        frozen = [{k: v for k, v in g.items() if k != "params"} for g in groups]

        def again():
            now = [{**group} for group in groups]
            for group, old in zip(groups, frozen, strict=True):
                group.update(old)
            curvature, self.optimizer._curvature = self.optimizer._curvature, None  # nobody asks it
            try:
                work()
            finally:
                self.optimizer._curvature = curvature
                for group, new in zip(groups, now, strict=True):
                    group.update(new)

        return again


def made(monkeypatch, recorder, groups=1, shapes=((6, 5), (7,), (6, 5)), **options):
    """An optimizer whose directions are recorded, without a GPU, by `recorder`."""
    ps = [torch.nn.Parameter(normal(*shape)) for shape in shapes]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    words = {"batch_size": 8, "matmul_dtype": torch.bfloat16, **options}
    optimizer = rootfree.IFShampoo(
        [{"params": ps[i::groups]} for i in range(groups)], fused=True, **words
    )
    if recorder is not None:
        recorder.optimizer = optimizer
        optimizer._replays = lambda p: Recordings(recorder)
    return optimizer, ps


def step(optimizer, ps, i) -> None:
    for j, p in enumerate(ps):
        p.grad = normal(*p.shape, seed=100 * i + j)
    optimizer.step()


def replayed(monkeypatch, *, change, steps=9, **options):
    """Runs with and without recordings, their numbers changed before each step."""
    recorder, results = Frozen(), []
    for each in (recorder, None):
        optimizer, ps = made(monkeypatch, each, **options)
        for i in range(steps):
            for group in optimizer.param_groups:
                group.update(change(i))
            step(optimizer, ps, i)
        results.append([t for p in ps for t in (p, *optimizer.state_dict()["state"][0].values())])
    assert all(map(torch.equal, *results))
    return recorder.recorded


@pytest.mark.parametrize("groups", [1, 3])
def test_numbers_may_change_without_a_new_recording(monkeypatch, groups):
    def change(i):
        return {
            "lr": 0.01 / (1 + i),
            "momentum": 0.9 - 0.05 * i,
            "weight_decay": 0.01 * i,
            "precond_lr": 0.1 + 0.02 * i,
            "damping": 1e-3 * (1 + i),
            "gamma": 1.0 - 0.05 * i,
            "batch_size": 8 + i,
            "max_update_rms": 1.0 + i,
            "update_rms": None if i < 5 else 0.1 * i,
            "nesterov": i > 6,
        }

    count = replayed(monkeypatch, change=change, groups=groups)
    # Each group has vectors or matrices or both; with and without a refresh.
    assert count == {1: 4, 3: 6}[groups]


def test_the_frozen_recorder_tells_where_numbers_come_from(monkeypatch):
    """By the rules they are in the graph: a change is a new kind, and is not recorded at once."""
    words = {"riemannian_momentum": 0.5}
    rules = replayed(monkeypatch, change=lambda i: {"precond_lr": 0.1 + 0.02 * i}, **words)
    assert rules == 0
    # What does not enter the directions is no part of the kind.
    rules = replayed(monkeypatch, change=lambda i: {"lr": 0.01 / (1 + i)}, **words)
    assert rules == 4


def test_an_optimizer_lets_go_of_its_recordings(monkeypatch):
    recorder = Frozen()
    optimizer, ps = made(monkeypatch, recorder)
    for i in range(8):
        step(optimizer, ps, i)
    assert recorder.recorded == 4
    optimizer.release()
    for i in range(8, 14):
        step(optimizer, ps, i)
    assert recorder.recorded == 8


def test_missing_gradients_have_recordings_of_their_own(monkeypatch):
    """A replay reads gradients and state where they were: another stack, another recording."""
    recorder, results = Frozen(), []
    for each in (recorder, None):
        optimizer, ps = made(monkeypatch, each)
        for i in range(20):
            for j, p in enumerate(ps):
                missing = i % 4 == 3 and j == 2
                p.grad = None if missing else normal(*p.shape, seed=100 * i + j)
            optimizer.step()
        results.append([p.detach() for p in ps])
    assert recorder.recorded > 0
    assert all(map(torch.equal, *results))


class OfMatrices(FromGradients):
    """Of the matrices alone; it remembers what it said."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self.said: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, p, *, batch_size):
        if p.dim() == 1:
            return None
        H = super().of(p, batch_size=batch_size)
        self.said += [(t, t.clone()) for t in vars(H).values() if isinstance(t, torch.Tensor)]
        self.said += [(t, t.clone()) for t in getattr(H, "factors", ())]
        return H


@pytest.mark.parametrize("form", ["kronecker", "outer products"])
def test_a_given_curvature_is_brought_to_where_recorded_work_finds_it(monkeypatch, form):
    """Bit for bit as without recordings, which ask nobody; the user's tensors are left alone."""
    recorder, results, given = Frozen(), [], OfMatrices(form)
    for each in (recorder, None):
        # One matrix: its curvature is used where it lies, without a copy into a stack.
        optimizer, ps = made(monkeypatch, each, shapes=((6, 5), (7,)), curvature=given)
        for i in range(7):
            step(optimizer, ps, i)
        results.append([t for p in ps for t in (p, *optimizer.state[p].values())])
    assert all(map(torch.equal, *results))
    assert recorder.recorded == 4  # matrices and the vector, with and without a refresh
    assert given.said
    assert all(torch.equal(tensor, before) for tensor, before in given.said)
