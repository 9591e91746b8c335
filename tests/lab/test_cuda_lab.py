"""The laboratory on a GPU: bit-identical continuation, honest times, bf16, records."""

from __future__ import annotations

import io
import math
import time

import pytest
import torch
from rich.console import Console

from conformance.problems import nothing_waits
from rootfree_lab import session
from rootfree_lab.compare import compare
from rootfree_lab.config_files import config_from
from rootfree_lab.data import Batches, Dataset, Split, load
from rootfree_lab.measures import PARTS, Stopwatch
from rootfree_lab.progress import Watcher
from rootfree_lab.records import read_records
from rootfree_lab.reproducibility import deterministic_algorithms
from rootfree_lab.stopping import Interrupted, StopSignals
from rootfree_lab.training import records_path, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# name -> data, model, settings of [train]
TASKS = {
    "cnn": ({"name": "digits", "augment": True}, "small_cnn", {"batch_size": 64}),
    "vit": ({"name": "digits", "augment": True}, "small_vit", {"batch_size": 64}),
    "gpt": ({"name": "made-up text"}, "gpt_micro", {"batch_size": 16, "context": 32}),
    "lstm": ({"name": "made-up text"}, "lstm_micro", {"batch_size": 16, "context": 32}),
}
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 3e-3},
    "Shampoo": {"lr": 3e-3},
    "RFRMSprop": {"lr": 3e-3},
    "IFShampoo": {"lr": 3e-3},
}


@pytest.fixture(autouse=True)
def made_up_text(monkeypatch):
    real = session.data.load

    def known(name, **arguments):
        if name != "made-up text":
            return real(name, **arguments)
        split = Split((torch.arange(6000) ** 2 % 97) % 7, torch.zeros(0))
        return Dataset(name, "text", split, split, None, 7, ())

    monkeypatch.setattr(session.data, "load", known)
    session._dataset.cache_clear()
    yield
    session._dataset.cache_clear()


def make(task, optimizer="AdamW", *, steps=20, options=None, output=None, **settings):
    data, model, train_settings = TASKS[task]
    return config_from(
        {
            "label": optimizer,
            "data": data,
            "model": {"name": model},
            "optimizer": {"name": optimizer, **OPTIMIZERS[optimizer], **(options or {})},
            "schedule": {"name": "cosine", "warmup_epochs": 0.1},
            "train": {
                "steps": steps,
                "device": "cuda",
                "eval_every": 10,
                **train_settings,
                **settings,
            },
            "output": output or {},
        }
    )


class Keeper(Watcher):
    """Keeps the model, and asks to stop after some steps."""

    def __init__(self, stop=None, after=None):
        self.stop, self.after = stop, after

    def stepped(self, session):
        if session.done == self.after:
            self.stop.received = 2
        if session.done == session.total:
            self.model = {k: v.clone() for k, v in session.model.state_dict().items()}


def curve(record):
    return [{k: v for k, v in point.items() if k != "seconds"} for point in record["curve"]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_stopped_and_resumed_is_bit_identical(tmp_path, task, optimizer):
    config = make(task, optimizer, autocast="bf16")
    straight = Keeper()
    whole = train(config, out=tmp_path / "straight", watchers=[straight])
    stop = StopSignals()
    with pytest.raises(Interrupted):
        train(config, out=tmp_path, stop=stop, watchers=[Keeper(stop, 7)])
    torch.manual_seed(99)
    torch.rand(100, device="cuda")  # what the process did in between must not matter
    resumed = Keeper()
    pieces = train(config, out=tmp_path, resume=True, watchers=[resumed])
    assert whole["completed"]
    assert all(math.isfinite(point["test_loss"]) for point in whole["curve"])
    assert curve(whole) == curve(pieces)
    for name, value in straight.model.items():
        assert torch.equal(value, resumed.model[name]), name


@pytest.mark.parametrize("optimizer", ["AdamW", "IFShampoo"])
@pytest.mark.parametrize("task", TASKS)
def test_graphs_give_the_same_run_and_so_does_a_resumed_one(tmp_path, task, optimizer):
    usual, graphed, resumed = Keeper(), Keeper(), Keeper()
    without = train(make(task, optimizer, autocast="bf16"), out=tmp_path, watchers=[usual])
    config = make(task, optimizer, autocast="bf16", graphs=True)
    whole = train(config, out=tmp_path / "whole", watchers=[graphed])
    stop = StopSignals()
    with pytest.raises(Interrupted):
        train(config, out=tmp_path, stop=stop, watchers=[Keeper(stop, 7)])
    pieces = train(config, out=tmp_path, resume=True, watchers=[resumed])
    assert curve(without) == curve(whole) == curve(pieces)
    for name, value in usual.model.items():
        assert torch.equal(value, graphed.model[name]), name
        assert torch.equal(value, resumed.model[name]), name


def test_graphs_are_recorded_and_clipping_sees_their_gradients(tmp_path):
    config = make("cnn", "SGD", graphs=True, clip_norm=1e-3)
    with deterministic_algorithms(True, torch.device("cuda")):
        run = session.Session(config, torch.device("cuda"))
        run.watch.start()
        for _ in range(8):
            before = [p.detach().clone() for p in run.model.parameters()]
            run.step()
        run.watch.pause()
    assert run._passes._recorded is not None
    moved = [p - q for p, q in zip(run.model.parameters(), before, strict=True)]
    size = torch.stack([d.norm() for d in moved]).norm().item()
    assert 0 < size < 0.1 * 1e-3 * 10  # lr times the largest norm, summed up by momentum


@pytest.mark.parametrize("autocast", ["none", "bf16"])
@pytest.mark.parametrize("task", TASKS)
def test_it_learns_and_the_state_stays_float32(tmp_path, task, autocast):
    keeper = Keeper()
    record = train(make(task, steps=60, autocast=autocast), out=tmp_path, watchers=[keeper])
    losses = [point["train_loss"] for point in record["curve"]]
    assert losses[-1] < losses[0]
    floats = [v.dtype for v in keeper.model.values() if v.is_floating_point()]
    assert set(floats) == {torch.float32}


def test_the_same_run_as_on_the_cpu(tmp_path):
    """Batches and augmentation are the same on every device, so the curves almost are."""
    on_gpu = train(make("cnn", "SGD"), out=tmp_path / "gpu")
    on_cpu = train(make("cnn", "SGD", device="cpu"), out=tmp_path / "cpu")
    for a, b in zip(on_gpu["curve"], on_cpu["curve"], strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=2e-2)


def test_batches_are_those_of_the_cpu():
    digits = load("digits")
    made = {
        device: Batches(
            digits.train,
            digits,
            batch_size=64,
            device=device,
            generator=torch.Generator().manual_seed(0),
            augment=True,
        )
        for device in ("cpu", "cuda")
    }
    for (x, y), (x_gpu, y_gpu) in zip(made["cpu"], made["cuda"], strict=True):
        assert x_gpu.is_cuda
        assert torch.equal(y, y_gpu.cpu())
        torch.testing.assert_close(x, x_gpu.cpu())


def test_the_parts_sum_to_about_the_total(tmp_path):
    train(make("vit", "IFShampoo", steps=5), out=tmp_path / "warm")
    seconds = train(make("vit", "IFShampoo", steps=200, eval_every=100), out=tmp_path)["seconds"]
    parts = sum(seconds[part] for part in PARTS)
    assert all(seconds[part] > 0 for part in PARTS)
    assert 0.75 * seconds["total"] < parts <= 1.02 * seconds["total"]


def test_a_part_is_the_time_of_the_gpu_and_nobody_waits_for_it():
    watch = Stopwatch(torch.device("cuda"), parts=True)
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    watch.start()
    began = time.perf_counter()
    with watch.part("forward"):
        for _ in range(100):
            x @ x
    handed_over = time.perf_counter() - began
    with watch.part("backward"):
        x @ x
    watch.pause()
    assert handed_over < 0.5 * watch.totals["forward"]
    assert watch.totals["forward"] == pytest.approx(100 * watch.totals["backward"], rel=0.5)
    assert watch.totals["forward"] + watch.totals["backward"] <= 1.02 * watch.totals["total"]


def test_a_step_does_not_wait_for_the_gpu():
    run = session.Session(make("cnn", "IFShampoo", autocast="bf16"), torch.device("cuda"))
    run.watch.start()
    for _ in range(5):
        run.step()
    with nothing_waits():
        for _ in range(5):
            run.step()
    run.watch.pause()


def test_without_timing_there_are_no_parts(tmp_path):
    seconds = train(make("cnn", output={"timing": False}), out=tmp_path)["seconds"]
    assert seconds["total"] > 0
    assert all(seconds[part] is None for part in PARTS)


def test_compare_writes_records_with_the_memory_of_each_run(tmp_path):
    runs = [make("cnn", name, autocast="bf16") for name in OPTIMIZERS]
    results = compare(runs, out=tmp_path, console=Console(file=io.StringIO()))
    records = read_records(records_path(tmp_path))
    assert len(records) == len(results) == len(OPTIMIZERS)
    by_label = {record["label"]: record for record in records}
    for record in records:
        assert record["completed"]
        assert record["versions"]["device"] == torch.cuda.get_device_name()
        assert record["memory"]["peak_bytes"] > record["memory"]["state_bytes"] > 0
    # A peak of its own for each run: SGD's is not that of the method before it.
    parameters = 4 * by_label["SGD"]["memory"]["parameters"]
    assert by_label["SGD"]["memory"]["state_bytes"] == pytest.approx(parameters, rel=0.01)
    again = compare(runs, out=tmp_path, console=Console(file=io.StringIO()))
    assert len(read_records(records_path(tmp_path))) == len(again)


def test_the_peak_is_that_of_the_run_and_not_of_the_trial_before_it(tmp_path, monkeypatch):
    peaks = [train(make("cnn"), out=tmp_path)["memory"]["peak_bytes"]]
    monkeypatch.setattr(session.Session, "why_not_deterministic", lambda self: None)
    peaks.append(train(make("cnn"), out=tmp_path)["memory"]["peak_bytes"])
    assert peaks[0] == peaks[1]


def test_a_failed_decomposition_of_a_diverged_run_is_a_divergence(tmp_path):
    record = train(make("cnn", "Shampoo", options={"lr": 1e30}), out=tmp_path)
    assert not record["completed"]
    assert record["failure"]["kind"] == "diverged"


@pytest.mark.parametrize("task", TASKS)
def test_all_kernels_are_deterministic(task):
    """Attention too: torch takes its deterministic kernels only where nothing else is allowed."""
    with deterministic_algorithms(True, torch.device("cuda")):
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        run = session.Session(make(task, autocast="bf16"), torch.device("cuda"))
        assert run.why_not_deterministic() is None


def test_a_model_without_deterministic_kernels_trains_with_a_warning(tmp_path, monkeypatch):
    def build(name, dataset, **options):
        pool = torch.nn.AdaptiveAvgPool2d(3)  # its backward pass adds atomically
        return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), pool, torch.nn.Flatten(),
                                   torch.nn.Linear(36, dataset.classes))  # fmt: skip

    monkeypatch.setattr(session.models, "build", build)
    with pytest.warns(UserWarning, match="may differ in the last bits"):
        record = train(make("cnn"), out=tmp_path)
    assert record["completed"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_fast_kernels_if_asked(tmp_path):
    with deterministic_algorithms(False, torch.device("cuda")):
        assert torch.backends.cudnn.benchmark
        assert not torch.are_deterministic_algorithms_enabled()
    record = train(make("cnn", deterministic=False, autocast="bf16"), out=tmp_path)
    assert record["completed"]
