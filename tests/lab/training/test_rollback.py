"""`train --rollback N`: back after divergence, on record, the same after a kill."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lab.faults import Fault, FaultyFiles, in_child
from rootfree_lab.cli import terminal
from rootfree_lab.cli.app import app
from rootfree_lab.config.files import config_from, load_config
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.files.records import read_records
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.training.divergence import Diverged, Losses, far_above
from rootfree_lab.training.run import records_path, train
from rootfree_lab.training.watching import measures

# Least squares: above a learning rate of about 0.3 every step is larger than the one before.
CONFIG = """
[data]
name = "digits"
limit = 64
[model]
name = "logistic"
[optimizer]
name = "SGD"
lr = 1.0
[schedule]
warmup_epochs = 20
[train]
steps = 100
batch_size = 16
eval_every = 20
device = "cpu"
loss = "square"
[output]
timing = false
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measures, "gc", SimpleNamespace(collect=int))  # slow after many imports
    monkeypatch.setattr(terminal, "console", Console(width=200))


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def config(config_file):
    def config(times, *more):
        return load_config(config_file, [f"train.rollback={times}", *more])

    return config


def test_a_run_that_diverges_goes_back_and_comes_to_its_end(tmp_path, config_file):
    out = tmp_path / "out"
    arguments = ["train", str(config_file), "--out", str(out)]
    without = CliRunner().invoke(app, arguments)
    assert without.exit_code == 1
    result = CliRunner().invoke(app, [*arguments, "--rollback", "2"])
    assert result.exit_code == 0, result.output
    assert "back to step 20, learning rate × 0.5" in result.output
    diverged, record = read_records(records_path(out))
    assert "rollbacks" not in diverged
    first, second = record["rollbacks"]
    assert (first["step"], first["to"], first["factor"]) == (40, 20, 0.5)
    assert "far above that of the first step" in first["reason"]
    assert (second["step"], second["to"], second["factor"]) == (80, 60, 0.25)
    # The curve is that of the steps that count.
    assert [point["step"] for point in record["curve"]] == [20, 40, 60, 80, 100]
    assert record["steps"] == 100
    assert record["curve"][-1]["lr"] == 0.25
    assert record["final"]["train_loss"] < record["curve"][0]["train_loss"]
    assert list((out / "checkpoints").iterdir()) == []


def test_no_rollback_is_left(tmp_path, config):
    record = train(config(1), out=tmp_path)
    assert not record["completed"]
    assert record["failure"]["kind"] == "diverged"
    assert [entry["to"] for entry in record["rollbacks"]] == [20]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_who_diverges_again_goes_further_back(tmp_path, config):
    """Half the rate is not enough where a state is half lost already."""
    record = train(config(3, "optimizer.lr=1.7", "train.eval_every=10"), out=tmp_path)
    assert record["completed"], record["failure"]
    assert [(r["step"], r["to"]) for r in record["rollbacks"]] == [(40, 20), (40, 10), (80, 60)]


def test_a_state_is_good_when_losses_after_it_were_seen(tmp_path, config):
    """It diverges from step 20 on, and is found out by step 40: 25, 30 and 35 are not good."""
    record = train(config(3, "optimizer.lr=1.2", "train.eval_every=5"), out=tmp_path)
    assert [(r["step"], r["to"]) for r in record["rollbacks"]] == [(40, 20), (60, 40)]


def test_an_interrupted_run_is_the_same(tmp_path, config, comparable, capfd):
    """Stopped every few steps, before and after it goes back."""
    whole = train(config(2), out=tmp_path / "whole")
    out, steps = tmp_path / "parts", 0
    while True:
        try:
            record = train(config(2), out=out, resume=True, stop=(stop := StopSignals()),
                           watchers=[_StopAfter(7, stop)])  # fmt: skip
            break
        except Interrupted:
            steps += 1
    assert steps > 14
    assert comparable(record) == comparable(whole)
    assert record["rollbacks"] == whole["rollbacks"]


class _Onlooker:
    def begin(self, session):
        pass

    def point(self, session, point):
        pass

    def end(self):
        pass


class _StopAfter(_Onlooker):
    def __init__(self, steps, stop):
        self.left, self.stop = steps, stop

    def stepped(self, session):
        self.left -= 1
        if self.left == 0:
            self.stop.received = signal.SIGTERM


class _Damage(_Onlooker):
    """Cuts the files of some states, at step 35: the run diverges by step 40."""

    def __init__(self, folder, names):
        self.folder, self.names = folder, names

    def stepped(self, session):
        if session.done == 35:
            for file in self.folder.glob(f"checkpoints/*.{self.names}.pt"):
                file.write_bytes(file.read_bytes()[:500])


def test_a_state_that_cannot_be_read_is_passed_over(tmp_path, config, capfd):
    record = train(config(2), out=tmp_path, watchers=[_Damage(tmp_path, "step20")])
    assert record["completed"]
    assert record["rollbacks"][0]["to"] == 0
    assert "step20.pt' cannot be read" in capfd.readouterr().err
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_without_a_state_that_can_be_read_a_run_has_diverged(tmp_path, config):
    record = train(config(2), out=tmp_path, watchers=[_Damage(tmp_path, "step*")])
    assert record["failure"]["kind"] == "diverged"
    assert "rollbacks" not in record
    assert len(read_records(records_path(tmp_path))) == 1


class _Lost(_Onlooker):
    """The parameters become NaN in a step whose loss, of those before, was finite."""

    def stepped(self, session):
        if session.done == 40 and not session.rollbacks:
            for p in session.model.parameters():
                p.data.fill_(math.nan)


def test_a_state_of_numbers_that_are_lost_is_not_kept(tmp_path, config):
    record = train(config(1, "optimizer.lr=0.01"), out=tmp_path, watchers=[_Lost()])
    assert record["completed"]
    assert [(r["step"], r["to"]) for r in record["rollbacks"]] == [(60, 20)]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")
def test_a_killed_run_is_the_same(tmp_path, config, comparable):
    """Killed at operations on files with a power cut, around going back among them."""
    (tmp_path / "whole").mkdir()
    with FaultyFiles(tmp_path / "whole") as files:
        whole = train(config(2), out=tmp_path / "whole")
    for at in range(1, len(files.operations), 9):
        folder = tmp_path / str(at)
        folder.mkdir()

        def killed(folder=folder, at=at):
            with FaultyFiles(folder, Fault(at, power=True)):
                train(config(2), out=folder)

        assert in_child(killed) == -signal.SIGKILL
        record = train(config(2), out=folder, resume=True)
        assert comparable(record) == comparable(whole), at
        assert record["rollbacks"] == whole["rollbacks"], at
        assert len(read_records(records_path(folder))) == 1, at


def test_without_it_a_run_is_what_it_was(config):
    assert "rollback" not in config(0).as_table()["train"]
    assert config(1).identity() != config(0).identity()


def test_where_it_cannot_work_it_is_refused(tmp_path, config):
    with pytest.raises(ConfigError, match=r"train\.rollback must be at least 0, got -1"):
        config(-1)
    with pytest.raises(ConfigError, match=r"train\.rollback goes with train\.parallel = 'none'"):
        config(1, "train.parallel=ddp")
    pytest.importorskip("sirfshampoo")
    tables = {**config(1).as_table(), "optimizer": {"name": "sirfshampoo", "lr": 0.1}}
    other = replace(config_from(tables), output=config(1).output)
    with pytest.raises(ConfigError, match=r"train\.rollback must be 0 for .*got 1"):
        train(other, out=tmp_path)


@pytest.mark.parametrize(
    ("loss", "first", "lowest", "is_far"),
    [
        (1.99, 1.0, 0.1, False),
        (2.01, 1.0, 0.1, True),
        (-1.0, -2.0, -7.0, False),  # losses may be negative: it has fallen by 5
        (3.1, -2.0, -7.0, True),
        (0.5, 0.0, -1.0, False),
        (float("inf"), 1.0, 1.0, True),
    ],
)
def test_far_above(loss, first, lowest, is_far):
    assert far_above(loss, first=first, lowest=lowest) is is_far


def test_one_bad_batch_is_no_divergence():
    losses = Losses()
    for loss in [1.0] * 10 + [15.0] + [1.0] * 9:
        losses.count(torch.tensor(loss))
    losses.look(20)
    for _ in range(20):
        losses.count(torch.tensor(2.1))
    with pytest.raises(Diverged, match=r"by step 40, 2\.1 on average.*the first step, 1"):
        losses.look(40)
