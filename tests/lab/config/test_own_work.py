"""A user's own model, data and loss, the config to start from, CSV, and logs elsewhere."""

from __future__ import annotations

import csv
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rootfree_lab.cli.app import app
from rootfree_lab.comparing.compare import compare
from rootfree_lab.config.files import load_comparison, load_config
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.data import DataError
from rootfree_lab.files.records import read_records
from rootfree_lab.training.checking import check
from rootfree_lab.training.run import records_path, train

CODE = """
import numpy as np
import torch
from torch import nn
from rootfree_lab import data

VALUE = 3

class Net(nn.Module):
    def __init__(self, dataset, width, depth=1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dataset.shape[0], width), nn.ReLU())
        self.head = nn.Linear(width, dataset.classes)
    def forward(self, x):
        return self.head(self.layers(x))

class Plain(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

def rows(folder=None, limit=None):
    x = np.random.default_rng(0).normal(size=(limit or 60, 4))
    return data.tabular("mine", x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0), classes=3)

def table():
    return rows()

def loss(outputs, targets):
    return 2 * nn.functional.cross_entropy(outputs, targets)

class Margin(nn.Module):
    def forward(self, outputs, targets):
        return nn.functional.multi_margin_loss(outputs, targets)

def one_argument(outputs): return outputs.mean()
def no_scalar(outputs, targets): return (outputs.sum(-1) - targets).square()
def no_module(): return 1
def no_dataset(): return [1, 2]
def breaks(): raise RuntimeError("on purpose")
"""
CONFIG = """
[data]
name = "mine.py:rows"
[model]
name = "mine.py:Net"
options = { width = 8 }
[optimizer]
name = "AdamW"
lr = 0.01
[train]
epochs = 3
batch_size = 16
device = "cpu"
loss = "mine.py:loss"
"""


@pytest.fixture
def mine(tmp_path):
    """A config with the code beside it; the folder is not on the path."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text(CODE)
    path = folder / "mine.toml"
    path.write_text(CONFIG)
    return path


def test_a_users_model_data_and_loss_train(mine, tmp_path):
    record = train(load_config(mine), out=tmp_path)
    assert record["completed"]
    assert record["curve"][-1]["train_loss"] < record["curve"][0]["train_loss"]
    assert record["curve"][-1]["test_error"] is not None
    assert record["model"] == "mine.py:Net"
    assert record["config"]["model"]["name"] == "mine.py:Net"
    assert record["memory"]["parameters"] == 4 * 8 + 8 + 8 * 3 + 3
    # The loss is the user's: twice the cross entropy.
    plain = train(load_config(mine, ["train.loss=cross_entropy"]), out=tmp_path)
    assert record["curve"][0]["train_loss"] == pytest.approx(
        2 * plain["curve"][0]["train_loss"], rel=0.1
    )


def test_other_code_is_another_run(mine, tmp_path):
    before = load_config(mine).identity()
    moved = tmp_path / "elsewhere"
    mine.parent.rename(moved)
    assert load_config(moved / "mine.toml").identity() == before
    (moved / "mine.py").write_text(CODE.replace("nn.ReLU()", "nn.Tanh()"))
    assert load_config(moved / "mine.toml").identity() != before


def test_a_module_of_a_package(mine, tmp_path, monkeypatch):
    package = tmp_path / "my_own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(mine, ["model.name=my_own_package.nets:Net"])
    check(config)
    assert config.as_table()["own_code"]["my_own_package.nets:Net"]
    assert train(load_config(mine, ["train.loss=torch.nn.functional:cross_entropy"]), out=tmp_path)
    assert train(load_config(mine, ["train.loss=torch.nn:CrossEntropyLoss"]), out=tmp_path)
    assert train(load_config(mine, ["train.loss=mine.py:Margin"]), out=tmp_path)
    plain = ["model.name=mine.py:Plain", "model.options={}"]
    assert train(load_config(mine, plain), out=tmp_path)["memory"]["parameters"] == 15


def test_nothing_is_imported_that_is_not_named(mine):
    (mine.parent / "mine.py").write_text("raise SystemExit('imported')")
    names = ["data.name=digits", "model.name=small_cnn", "train.loss=cross_entropy"]
    check(load_config(mine, [*names, "model.options={}"]))


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["model.name=other.py:Net"], "model.name: there is no file"),
        (["model.name=no_such_package.nets:Net"], "no module 'no_such_package'"),
        (["model.name=mine.py:Nett"], "'Nett' is unknown; did you mean 'Net'?"),
        (["model.name=mine.py:VALUE"], "must be callable, got int"),
        (["model.name=mine.py:"], 'must be "package.module:name" or "file.py:name"'),
        (["model.options.widht=8"], "did you mean 'width'?"),
        (["model.options={}"], "needs the option 'width'"),
        (["data.name=mine.py:no_dataset"], "must return a rootfree_lab.data.Dataset, got list"),
        (["data.name=mine.py:breaks"], "raised RuntimeError: on purpose"),
        (["data.name=mine.py:table", "data.folder=x"], "data.folder is given, but"),
        (["train.loss=mine.py:one_argument"], "must take outputs and targets"),
        (["train.loss=mine.py:nothing"], "train.loss: the name in"),
        (["train.loss=cross_entropi"], "did you mean 'cross_entropy'?"),
        (["train.label_smoothing=0.1"], "label_smoothing goes with"),
        (["output.wandb=project"], "output.wandb needs wandb"),
    ],
)
def test_mistakes_are_told_before_training(mine, assignments, said, monkeypatch):
    monkeypatch.setattr(
        "rootfree_lab.config.needed.find_spec", lambda name: None if name == "wandb" else 1
    )
    with pytest.raises((ConfigError, DataError)) as error:
        check(load_config(mine, assignments))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["model.name=mine.py:no_module", "model.options={}"], "must return a torch.nn.Module"),
        (["train.loss=mine.py:no_scalar"], "must return a scalar, the mean over examples"),
    ],
)
def test_what_shows_in_training_only_is_told_as_well(mine, tmp_path, assignments, said):
    with pytest.raises(ConfigError, match=said):
        train(load_config(mine, assignments), out=tmp_path)


def test_code_that_cannot_be_imported_is_named(mine):
    (mine.parent / "mine.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"mine\.py cannot be imported: SyntaxError"):
        check(load_config(mine))
    (mine.parent / "mine.py").write_text("import no_such_thing\n")
    with pytest.raises(ConfigError, match="needs no_such_thing"):
        check(load_config(mine))


def test_limits_of_data_without_the_argument_are_applied(mine, tmp_path):
    check(load_config(mine, ["data.name=mine.py:table", "data.limit=16"]))
    from rootfree_lab import data

    name = f"{mine.parent / 'mine.py'}:table"
    assert len(data.load(name).train) == 48
    assert len(data.load(name, limit=16).train) == 16


# -- a config to start from ------------------------------------------------------------------


def test_a_new_config_trains_and_compares_as_written(tmp_path):
    path = tmp_path / "experiment.toml"
    said = CliRunner().invoke(app, ["new", str(path)])
    assert said.exit_code == 0, said.output
    text = path.read_text()
    for run in load_comparison(path):
        check(run)
    small = ["train.epochs=1", "data.limit=64", "schedule.warmup_epochs=0"]
    assert train(load_config(path, small), out=tmp_path)["completed"]
    again = CliRunner().invoke(app, ["new", str(path)])
    assert again.exit_code == 2
    assert "choose another name" in again.output
    assert path.read_text() == text


# -- CSV and logs ----------------------------------------------------------------------------


def test_records_as_csv(mine, tmp_path):
    record = train(load_config(mine), out=tmp_path)
    train(load_config(mine, ["optimizer.lr=1e30"]), out=tmp_path)
    for arguments, count in (([], 2), (["--curves"], 3 + 3)):
        target = tmp_path / "runs.csv"
        said = CliRunner().invoke(
            app, ["export", str(records_path(tmp_path)), "--out", str(target), *arguments]
        )
        assert said.exit_code == 0, said.output
        with open(target, newline="") as file:
            rows = list(csv.DictReader(file))
        curve = sum(len(r["curve"]) for r in read_records(records_path(tmp_path)))
        assert len(rows) == (curve if arguments else count)
        if arguments:
            assert float(rows[1]["test_loss"]) == record["curve"][1]["test_loss"]
            assert rows[1]["step"] == str(record["curve"][1]["step"])
        else:
            assert float(rows[0]["test_error"]) == record["final"]["test_error"]
            assert (rows[0]["status"], rows[0]["optimizer.lr"]) == ("completed", "0.01")
            assert rows[0]["model.options.width"] == "8"
            assert rows[1]["optimizer.lr"] == "1e+30"


def test_an_export_of_nothing_is_refused(tmp_path):
    said = CliRunner().invoke(app, ["export", str(tmp_path / "nothing")])
    assert said.exit_code == 2
    assert "there is no file or folder" in said.output


def test_wandb_gets_every_point(mine, tmp_path, monkeypatch):
    logged: list = []
    run = SimpleNamespace(
        log=lambda figures, step: logged.append((step, figures)),
        finish=lambda: logged.append("finished"),
    )

    def init(**given):
        logged.append(given)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=1))
    config = load_config(mine, ["output.wandb=mine"])
    record = train(config, out=tmp_path)
    begin, *points, end = logged
    assert (begin["project"], begin["id"]) == ("mine", config.identity())
    assert end == "finished"
    assert [step for step, _ in points] == [point["step"] for point in record["curve"]]
    assert points[-1][1]["test_error"] == record["final"]["test_error"]


def test_a_comparison_without_the_package_trains_nothing(mine, tmp_path, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("rootfree_lab.config.needed.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs tensorboard"):
        compare([load_config(mine, ["output.tensorboard=true"])], out=tmp_path, console=Console())
    assert not records_path(tmp_path).exists()
