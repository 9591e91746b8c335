"""Directions of small models come from CUDA graphs by themselves: nothing else may change."""

from __future__ import annotations

import copy
import gc
import threading
import warnings

import pytest
import torch

import rootfree
from conformance.problems import (
    BATCH,
    batches,
    identical,
    loss_of,
    network,
    nothing_waits,
    snapshot,
)
from rootfree.kernels.fused_stack import FusedStack
from rootfree.kernels.graphs import GraphRecorder
from rootfree.shell import block_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPTIONS = {
    "default": {},
    "low-memory": {"factor_dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    "structured": {"structure": {1: "diagonal", 2: ("dense", "lower_triangular")}},
    "momentum": {"riemannian_momentum": 0.5},
    "cut": {"block_size": 8},
}
STEPS = 14


class Run:
    """A model that is stepped with or without replays, told apart by the size that gets them."""

    def __init__(self, monkeypatch, *, replayed, **options):
        self.limit = block_optimizer.REPLAYED if replayed else -1
        self.monkeypatch = monkeypatch
        self.model = network().cuda()
        self.model[1].eval()
        self.options = {"lr": 0.01, "batch_size": BATCH, **options}
        self.optimizer = rootfree.IFShampoo(self.model.parameters(), **self.options)

    def backward(self, x, y):
        self.optimizer.zero_grad()
        loss_of(self.model, x.cuda(), y.cuda()).backward()

    def step(self):
        self.monkeypatch.setattr(block_optimizer, "REPLAYED", self.limit)
        self.optimizer.step()

    @property
    def recordings(self) -> list:
        """Of the stacks of all patterns of gradients that are remembered."""
        return [
            stack._recordings
            for memory in self.optimizer._memories.values()
            for _, works in memory.patterns
            for work in works
            for _, stack in work.stacks or []
            if isinstance(stack, FusedStack) and stack._recordings is not None
        ]

    @property
    def graphs(self) -> int:
        return sum(len(recordings._recorded) for recordings in self.recordings)


def compare(monkeypatch, *, steps=STEPS, change=lambda run, i: None, **options) -> list[Run]:
    """Both runs, given the same gradients, stay identical; `change` comes before the step."""
    runs = [Run(monkeypatch, replayed=replayed, **options) for replayed in (True, False)]
    for i, (x, y) in enumerate(batches(steps)):
        runs[1].backward(x, y)
        for p, q in zip(*(run.model.parameters() for run in runs), strict=True):
            p.grad = q.grad.clone()
        for run in runs:
            change(run, i)
            run.step()
        assert identical(*(snapshot(run.optimizer) for run in runs)), f"step {i}"
    assert runs[1].graphs == 0
    return runs


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_trajectory_is_the_same_bit_for_bit(monkeypatch, options):
    replayed, _ = compare(monkeypatch, **options)
    assert replayed.graphs == 4  # vectors and matrices, with and without a refresh


def recorded(monkeypatch) -> list[int]:
    """Counts recordings, in a list of one number, from here on."""
    count, record = [0], GraphRecorder.__call__

    def counted(self, work):
        count[0] += 1
        return record(self, work)

    monkeypatch.setattr(GraphRecorder, "__call__", counted)
    return count


def test_with_numbers_that_change_at_every_step(monkeypatch):
    """Kernels read them from the device: the graphs follow without a new recording."""

    def change(run, i):
        run.optimizer.batch_size = BATCH + i
        run.optimizer.param_groups[0].update(
            lr=0.01 / (i + 1),
            momentum=0.9 - 0.01 * i,
            precond_lr=0.1 + 0.01 * i,
            damping=1e-3 * (i + 1),
            gamma=1.0 - 0.02 * i,
            weight_decay=0.01 * i,
            max_update_rms=1.0 + 0.1 * i,
        )

    count = recorded(monkeypatch)
    replayed, _ = compare(monkeypatch, change=change)
    assert replayed.graphs == 4
    assert count == [4]


@pytest.mark.parametrize("options", [{}, OPTIONS["structured"]], ids=["kernels", "rules"])
def test_with_another_batch_size(monkeypatch, options):
    def change(run, i):
        run.optimizer.batch_size = BATCH if i < 8 else 2 * BATCH

    compare(monkeypatch, change=change, steps=18, **options)


def test_with_groups_of_their_own(monkeypatch):
    """Each has stacks, and they have graphs, of its own."""
    run = Run(monkeypatch, replayed=True)
    ps = list(run.model.parameters())
    parts = [{"params": ps[i::3], "weight_decay": 0.1 * i} for i in range(3)]
    run.optimizer = rootfree.IFShampoo(parts, **run.options)
    count = recorded(monkeypatch)
    for x, y in batches(STEPS):
        run.backward(x, y)
        run.step()
    assert run.graphs == count[0] == 2 * len(run.recordings)  # with and without a refresh
    assert len(run.recordings) > 3


def test_recordings_are_dropped_and_made_anew(monkeypatch):
    count = recorded(monkeypatch)

    def change(run, i):
        if i == 10:
            run.optimizer.release()
            assert run.graphs == 0

    replayed, _ = compare(monkeypatch, change=change, steps=20)
    assert replayed.graphs == 4
    assert count == [8]


def test_with_gradients_that_are_missing_now_and_then(monkeypatch):
    def change(run, i):
        if i % 3 == 2:
            next(iter(run.model.parameters())).grad = None

    compare(monkeypatch, change=change, steps=30)


def test_with_a_checkpoint_in_between(monkeypatch):
    kept = {}

    def change(run, i):
        if i == 3:
            kept[run] = copy.deepcopy(run.optimizer.state_dict())
        if i == 10:
            run.optimizer.load_state_dict(kept[run])

    compare(monkeypatch, change=change, steps=20)


def test_with_state_that_somebody_replaced(monkeypatch):
    def change(run, i):
        if i == 9:
            for state in run.optimizer.state.values():
                state.update({key: tensor.clone() for key, tensor in state.items()})

    compare(monkeypatch, change=change, steps=20)


def test_a_copy_goes_its_own_way(monkeypatch):
    run = Run(monkeypatch, replayed=True)
    for x, y in batches(8):
        run.backward(x, y)
        run.step()
    assert run.graphs == 4
    before = [t.clone() for t in snapshot(run.optimizer)]
    other = copy.deepcopy(run.optimizer)
    for group in other.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    for _ in range(8):
        other.step()
    assert identical(before, snapshot(run.optimizer))


def test_inside_a_graph_of_the_whole_step(monkeypatch):
    """GraphedStep records everything itself, and steps as usual may come in between."""
    run = Run(monkeypatch, replayed=True)
    usual = Run(monkeypatch, replayed=False)
    graphed = rootfree.GraphedStep(run.optimizer)
    for i, (x, y) in enumerate(batches(24)):
        usual.backward(x, y)
        for p, q in zip(run.model.parameters(), usual.model.parameters(), strict=True):
            p.grad = q.grad.clone()
        usual.step()
        monkeypatch.setattr(block_optimizer, "REPLAYED", run.limit)
        (run.optimizer if 8 <= i < 16 else graphed).step()
        assert identical(snapshot(run.optimizer), snapshot(usual.optimizer)), f"step {i}"


def test_nothing_waits_once_it_is_recorded(monkeypatch):
    run = Run(monkeypatch, replayed=True)
    x, y = next(iter(batches(1)))
    run.backward(x, y)
    for _ in range(8):
        run.step()
    with nothing_waits():
        for _ in range(4):
            run.step()


def test_other_threads_may_use_the_device_while_it_is_recorded(monkeypatch):
    """As a loader's thread that pins memory does."""
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            torch.empty(1000).pin_memory().cuda(non_blocking=True).sum().item()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            replayed, _ = compare(monkeypatch)
    finally:
        stop.set()
        thread.join()
    assert replayed.graphs == 4


def test_a_graph_that_became_garbage_does_not_spoil_the_next(monkeypatch):
    """Its end is not allowed while another is recorded: the collector has to wait."""
    eager = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                run = Run(monkeypatch, replayed=True)
                run.optimizer.itself = run.optimizer  # only the collector ends it
                for x, y in batches(8):
                    run.backward(x, y)
                    run.step()
                assert run.graphs == 4
    finally:
        gc.set_threshold(*eager)


@pytest.mark.parametrize("groups", [1, 3])
def test_large_models_keep_no_memory_for_it(monkeypatch, groups):
    """The whole model counts, not a group of it."""
    total = 8 * sum(p.numel() for p in network().parameters())
    part = total / torch.cuda.get_device_properties("cuda").total_memory
    for limit, graphs in ((1.001 * part, True), (0.999 * part, False)):
        run = Run(monkeypatch, replayed=True)
        run.limit = limit
        ps = list(run.model.parameters())
        parts = [{"params": ps[i::groups]} for i in range(groups)]
        run.optimizer = rootfree.IFShampoo(parts, **run.options)
        for x, y in batches(8):
            run.backward(x, y)
            run.step()
        assert (run.graphs > 0) is graphs
