"""Every operation on files fails once, and kills once: nothing is lost, doubled or torn."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from random import Random
from types import SimpleNamespace

import pytest
import torch
from typer.main import get_command

from lab.conftest import without_times
from lab.faults import FaultyFiles, faults, in_child
from rootfree_lab.cli.app import app
from rootfree_lab.config.files import load_config
from rootfree_lab.files.checkpoints import checkpoint_path, load
from rootfree_lab.files.records import read_records
from rootfree_lab.training.run import records_path
from rootfree_lab.training.watching import measures

pytestmark = pytest.mark.slow

CONFIG = """
[data]
name = "digits"
limit = 32
[model]
name = "logistic"
[optimizer]
name = "RFRMSprop"
lr = 0.01
[train]
steps = 3
batch_size = 16
eval_every = 2
device = "cpu"
[output]
checkpoint_minutes = 0
timing = false
weights = true
[[compare]]
label = "RFRMSprop"
[[compare]]
label = "SGD"
optimizer = { name = "SGD", lr = 0.1 }
"""
FAILURES = [
    {"error": errno.ENOSPC},
    {"error": errno.EIO},
    {"error": errno.EACCES},
    {"error": errno.ENOSPC, "short": True},
    {"error": errno.ENOSPC, "lasting": True},
]
KILLS = [{}, {"short": True}, {"power": True}, {"short": True, "power": True}]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measures, "gc", SimpleNamespace(collect=int))  # slow after many imports


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


class Command:
    """A command that is run again and again with one folder, and what it must leave."""

    def __init__(self, name, config_file, folder):
        self.name, self.config_file, self.folder = name, config_file, folder
        self.out = folder / "out"
        self.folder.mkdir()
        with FaultyFiles(folder) as files:
            assert self.run() == 0
        self.operations = files.operations
        # From here on there is a checkpoint, by its name and its content, or the record.
        self.safe = self.operations.index("rename") + 2
        self.expected, self.weights = self.records(), self.saved()
        assert len(self.expected) == (1 if name == "train" else 2)

    def run(self):
        more = ["--resume"] if self.name == "train" else []
        arguments = [self.name, str(self.config_file), "--out", str(self.out), *more]
        return get_command(app).main(arguments, standalone_mode=False)

    def records(self):
        return [without_times(record) for record in read_records(records_path(self.out))]

    def saved(self):
        return {p.name: torch.load(p) for p in sorted((self.out / "weights").iterdir())}

    def begin_anew(self):
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def meet(self, fault):
        with FaultyFiles(self.folder, fault):
            return self.run()

    def check_what_is_left(self, fault):
        """Between the fault and the next attempt: some of the records, none of them torn."""
        if records_path(self.out).exists():
            *lines, tail = records_path(self.out).read_bytes().split(b"\n")
            found = [without_times(json.loads(line)) for line in lines]
            assert found == self.expected[: len(found)], fault
            assert not (tail and fault.error), fault  # only a kill leaves half a line
        config = load_config(self.config_file)
        if checkpoint_path(self.out, config).exists():
            assert load(checkpoint_path(self.out, config), config)["step"] in (1, 2), fault
        elif fault.at >= self.safe and not fault.lasting and not fault.error:
            assert records_path(self.out).exists(), fault

    def check_that_it_continues(self, fault):
        assert self.run() == 0, fault
        assert self.records() == self.expected, fault
        assert list((self.out / "checkpoints").glob("*")) == [], fault
        found = self.saved()
        assert list(found) == list(self.weights), fault
        for name, state in found.items():
            assert all(torch.equal(state[key], self.weights[name][key]) for key in state), fault


@pytest.fixture
def commands(tmp_path, config_file):
    return [Command(name, config_file, tmp_path / name) for name in ("train", "compare")]


def chosen(commands, kinds):
    """200 faults: all of one run, and some of two, which write the same kinds of files."""
    one, two = ([(c, fault) for fault in faults(c.operations, kinds)] for c in commands)
    return one + Random(0).sample(two, 200 - len(one))


def test_every_failure(commands, capfd):
    for command, fault in chosen(commands, FAILURES):
        command.begin_anew()
        capfd.readouterr()
        code = command.meet(fault)
        said = capfd.readouterr().err.splitlines()
        # Done all the same, or one sentence; either way every line says which file it is about.
        assert (code == 0) == (not any(line.startswith("Error: ") for line in said)), fault
        assert code in (0, 2), fault
        assert all(str(command.folder) in line for line in said), (fault, said)
        command.check_what_is_left(fault)
        command.check_that_it_continues(fault)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")
def test_every_kill(commands, capfd):
    for command, fault in chosen(commands, KILLS):
        command.begin_anew()
        ended = in_child(lambda command=command, fault=fault: command.meet(fault))
        assert ended == -signal.SIGKILL, (fault, capfd.readouterr())
        command.check_what_is_left(fault)
        command.check_that_it_continues(fault)
        capfd.readouterr()
