"""A search whose files fail, or that is killed at any operation: each trial is recorded once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

from lab.faults import FaultyFiles, faults, in_child
from lab.search.inline_pool import work_inline
from rootfree_lab.cli.app import app
from rootfree_lab.config.files import load_comparison
from rootfree_lab.files.records import read_records
from rootfree_lab.search import storage
from rootfree_lab.training.run import records_path

pytestmark = pytest.mark.slow


@pytest.fixture
def search(tmp_path, config_file, monkeypatch):
    """Run the command with one folder; its exit code and what it said."""
    work_inline(monkeypatch)
    monkeypatch.setattr(storage, "_DELAYS", ())
    sets = ["search.trials=[2, 1]", "output.checkpoint_minutes=0", "output.timing=false"]
    arguments = [part for each in sets for part in ("--set", each)]

    def search(folder, fault=None):
        folder.mkdir(exist_ok=True)
        with FaultyFiles(folder, fault) as files:
            made = ["search", str(config_file), "--out", str(folder / "out"), "--only", "SGD"]
            result = CliRunner().invoke(app, [*made, *arguments])
        return result, files.operations

    return search


def results(out):
    """Label -> final figures of every trial; none is there twice."""
    records = read_records(records_path(out))
    assert max(Counter(record["label"] for record in records).values()) == 1
    return {record["label"]: record["final"] for record in records}


def check_that_it_continues(search, folder, expected, fault):
    result, _ = search(folder)
    assert result.exit_code == 0, (fault, result.output)
    assert results(folder / "out") == expected, fault
    assert list((folder / "out" / "checkpoints").glob("*")) == [], fault
    assert len(load_comparison(folder / "out" / "best.toml")) == 2, fault
    shutil.rmtree(folder)


def test_every_failure(search, tmp_path):
    folder = tmp_path / "files"
    result, operations = search(folder)
    assert result.exit_code == 0, result.output
    expected = results(folder / "out")
    assert len(expected) == 3
    shutil.rmtree(folder)
    kinds = [{"error": errno.ENOSPC, "lasting": True}, {"error": errno.EIO, "short": True}]
    for fault in faults(operations, kinds)[::9]:
        result, _ = search(folder, fault)
        assert result.exit_code in (0, 2), (fault, result.output, result.exception)
        assert result.exit_code == 0 or "be written" in result.output, fault
        check_that_it_continues(search, folder, expected, fault)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")
def test_every_kill(search, tmp_path):
    folder = tmp_path / "files"
    _, operations = search(folder)
    expected = results(folder / "out")
    shutil.rmtree(folder)
    for fault in faults(operations, [{"power": True}, {"short": True}])[::9]:
        folder.mkdir()
        ended = in_child(lambda fault=fault: search(folder, fault))
        assert ended == -signal.SIGKILL, fault
        check_that_it_continues(search, folder, expected, fault)
