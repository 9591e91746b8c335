"""Determinism, checkpoints and the bit-identical continuation."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

from rootfree_lab import checkpoints, losses, session, training
from rootfree_lab.checkpoints import CheckpointError, checkpoint_path
from rootfree_lab.records import read_records
from rootfree_lab.reproducibility import allow_other_kernels, deterministic_algorithms
from rootfree_lab.session import Session
from rootfree_lab.stopping import Interrupted, StopSignals
from rootfree_lab.training import records_path, train

from .conftest import OPTIMIZERS


@pytest.fixture(autouse=True)
def random_model(monkeypatch):
    """Dropout and batch statistics: randomness while training, state that is no parameter."""

    def build(name, dataset, **options):
        return torch.nn.Sequential(
            torch.nn.Conv2d(dataset.shape[0], 8, 3),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 36, dataset.classes),
        )

    monkeypatch.setattr(session.models, "build", build)


class Parameters(training.Watcher):
    """Keeps the trained parameters; asks to stop after some steps."""

    def __init__(self, stop=None, after=None):
        self.stop, self.after = stop, after

    def stepped(self, session: Session) -> None:
        self.values = [p.detach().clone() for p in session.model.parameters()]
        self.buffers = [b.clone() for b in session.model.buffers()]
        if session.done == self.after:
            self.stop.received = 2


def assert_equal(a, b):
    for x, y in zip(a.values + a.buffers, b.values + b.buffers, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
# Inside an epoch and a curve interval; at the end of an epoch; just after a point.
@pytest.mark.parametrize("after", [4, 5, 6])
def test_stopped_and_resumed_is_bit_identical(tmp_path, make_config, comparable, optimizer, after):
    config = make_config(optimizer)
    straight = Parameters()
    whole = train(config, out=tmp_path / "straight", watchers=[straight])

    stop = StopSignals()
    with pytest.raises(Interrupted):
        train(config, out=tmp_path, stop=stop, watchers=[Parameters(stop, after)])
    assert checkpoint_path(tmp_path, config).exists()
    assert not records_path(tmp_path).exists()
    torch.manual_seed(99)  # what the process did in between must not matter
    resumed = Parameters()
    pieces = train(config, out=tmp_path, resume=True, watchers=[resumed])

    assert_equal(straight, resumed)
    assert comparable(whole) == comparable(pieces)
    assert [point["step"] for point in pieces["curve"]] == [3, 6, 8]
    assert not checkpoint_path(tmp_path, config).exists()
    assert len(read_records(records_path(tmp_path))) == 1


def test_the_clock_goes_on_where_it_stopped(tmp_path, make_config):
    config = make_config()
    stop = StopSignals()
    with pytest.raises(Interrupted):
        train(config, out=tmp_path, stop=stop, watchers=[Parameters(stop, 4)])
    path = checkpoint_path(tmp_path, config)
    before = checkpoints.load(path, config)["seconds"]
    after = train(config, out=tmp_path, resume=True)["seconds"]
    assert before["total"] > 0
    assert all(after[part] > before[part] for part in ("total", "forward", "optimizer", "data"))
    parts = after["data"] + after["forward"] + after["backward"] + after["optimizer"]
    assert parts <= after["total"]


def test_same_seed_same_run_and_another_seed_another(tmp_path, make_config, comparable):
    watchers = [Parameters() for _ in range(3)]
    seeds = (0, 0, 1)
    records = [
        train(make_config(seed=seed), out=tmp_path / str(i), watchers=[watcher])
        for i, (seed, watcher) in enumerate(zip(seeds, watchers, strict=True))
    ]
    assert_equal(watchers[0], watchers[1])
    assert comparable(records[0]) == comparable(records[1])
    assert not torch.equal(watchers[0].values[0], watchers[2].values[0])


def test_another_configs_checkpoint_is_refused(tmp_path, make_config):
    stop = StopSignals()
    with pytest.raises(Interrupted):
        train(make_config(), out=tmp_path, stop=stop, watchers=[Parameters(stop, 2)])
    other = make_config(steps=9)
    checkpoint_path(tmp_path, make_config()).rename(checkpoint_path(tmp_path, other))
    with pytest.raises(CheckpointError, match=r"another config .*train\.steps"):
        train(other, out=tmp_path, resume=True)


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_checkpoint_is_an_error_that_names_it(tmp_path, make_config, damage):
    config = make_config()
    stop = StopSignals()
    with pytest.raises(Interrupted):
        train(config, out=tmp_path, stop=stop, watchers=[Parameters(stop, 2)])
    path = checkpoint_path(tmp_path, config)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(config, out=tmp_path, resume=True)


def test_a_failing_write_leaves_the_old_checkpoint(tmp_path, make_config, monkeypatch):
    config = make_config()
    path = checkpoint_path(tmp_path, config)
    checkpoints.save(path, config, {"step": 1})

    def full(handle):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(path, config, {"step": 2})
    assert checkpoints.load(path, config)["step"] == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_bf16_autocast_runs_and_square_loss_learns(tmp_path, make_config):
    config = make_config("AdamW", steps=20, autocast="bf16", loss="square", square_m=3.0)
    losses = [point["train_loss"] for point in train(config, out=tmp_path)["curve"]]
    assert losses[-1] < losses[0]


def test_channels_last_changes_the_layout_and_the_identity_alone(tmp_path, make_config):
    usual, last = make_config(), make_config(channels_last=True)
    assert usual.identity() != last.identity()
    seen = []
    built = Session(last, torch.device("cpu"))
    built.model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    built.watch.start()
    built.step()
    assert seen[0].stride() == torch.empty_like(seen[0], memory_format=torch.channels_last).stride()
    losses = [train(config, out=tmp_path)["final"]["train_loss"] for config in (usual, last)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_model_without_deterministic_kernels_is_named_before_it_trains(make_config, monkeypatch):
    built = Session(make_config(), torch.device("cpu"))
    random = torch.get_rng_state()
    before = [value.clone() for value in built.model.state_dict().values()]
    assert built.why_not_deterministic() is None

    def refuse(*arguments):
        raise RuntimeError("scatter_x does not have a deterministic implementation. Turn it off")

    monkeypatch.setattr(losses.functional, "cross_entropy", lambda *a, **k: refuse())
    said = built.why_not_deterministic()
    assert said == "scatter_x does not have a deterministic implementation"
    # The trial leaves nothing behind.
    assert torch.equal(random, torch.get_rng_state())
    after = built.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in built.model.parameters())


def test_the_trial_takes_a_batch_of_training_and_gives_it_back(make_config, monkeypatch):
    tried, other = (Session(make_config(), torch.device("cpu")) for _ in range(2))
    seen = []
    forward = tried._forward
    monkeypatch.setattr(tried, "_forward", lambda b, m: seen.append(b.target) or forward(b, m))
    tried.why_not_deterministic()
    assert [len(target) for target in seen] == [32]
    assert all(torch.equal(tried.feed.take().target, other.feed.take().target) for _ in range(7))


def test_a_run_that_is_over_takes_no_memory_from_the_next(make_config):
    gc.disable()  # it would come some time, and not always before the peak is measured
    try:
        over = weakref.ref(Session(make_config(), torch.device("cpu")).model)
        following = Session(make_config(), torch.device("cpu"))
        assert over() is None
        assert following.done == 0
    finally:
        gc.enable()


def test_other_kernels_are_allowed_with_a_warning_until_the_run_is_over():
    with deterministic_algorithms(True, torch.device("cpu")):
        torch.use_deterministic_algorithms(True)
        with pytest.warns(UserWarning, match="may differ in the last bits.*scatter_x"):
            allow_other_kernels("scatter_x has none")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
