"""Processes that are interrupted, and what they leave; `test_faults` has those that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from rootfree_lab.config.files import load_config
from rootfree_lab.files.checkpoints import checkpoint_path
from rootfree_lab.files.records import read_records
from rootfree_lab.training.run import records_path

pytestmark = pytest.mark.slow

COMMAND = "from rootfree_lab.cli import main; main()"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def config_file(config_file):
    text = config_file.read_text().replace("epochs = 1", "steps = 6\neval_every = 2")
    config_file.write_text(text + "[output]\ncheckpoint_minutes = 0\n")
    return config_file


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
