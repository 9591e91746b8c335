"""Processes that are killed or interrupted, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from rootfree_lab.checkpoints import checkpoint_path
from rootfree_lab.config_files import load_config
from rootfree_lab.records import read_records
from rootfree_lab.training import records_path, train

pytestmark = pytest.mark.slow

# Kills its own process inside the second checkpoint write, in the named system call.
KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from rootfree_lab import checkpoints
from rootfree_lab.config_files import load_config
from rootfree_lab.training import train

where, calls = sys.argv[3], 0
def killing(call):
    def kill(*arguments):
        global calls
        calls += 1
        # The folder is synced too: every second fsync is of a file.
        if calls == (3 if where == "fsync" else 2):
            if where == "half":
                with open(arguments[0], "r+b") as file:
                    file.truncate(100)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return kill
name = "fsync" if where == "fsync" else "replace"
setattr(checkpoints.os, name, killing(getattr(os, name)))
train(load_config(Path(sys.argv[1])), out=Path(sys.argv[2]))
"""

COMMAND = "from rootfree_lab.cli import main; main()"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def config_file(config_file):
    text = config_file.read_text().replace("epochs = 1", "steps = 6\neval_every = 2")
    config_file.write_text(text + "[output]\ncheckpoint_minutes = 0\n")
    return config_file


@pytest.mark.parametrize("where", ["fsync", "replace", "half"])
def test_kill_9_during_a_checkpoint_write(tmp_path, config_file, comparable, where):
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, str(config_file), str(out), where],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    config = load_config(config_file)
    path = checkpoint_path(out, config)
    assert path.exists()
    assert len(list(path.parent.iterdir())) == 2  # what was being written lies beside it
    resumed = train(config, out=out, resume=True)
    straight = train(config, out=tmp_path / "straight")
    assert comparable(resumed) == comparable(straight)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_its_exit_code(tmp_path, config_file, signum):
    config_file.write_text(config_file.read_text().replace("steps = 6", "steps = 100000"))
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "train", str(config_file), "--out", str(out)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    config = load_config(config_file)
    path = checkpoint_path(out, config)
    try:
        patience = time.monotonic() + 60
        while not path.exists() and process.poll() is None and time.monotonic() < patience:
            time.sleep(0.05)
        process.send_signal(signum)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + signum, said
    assert "--resume" in said
    assert "Traceback" not in said
    assert path.exists()
    assert read_records(records_path(out)) == []
