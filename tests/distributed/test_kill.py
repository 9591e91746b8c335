"""A rank is killed in the middle of a step; torchrun starts all again, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.program import SECOND, ranks  # noqa: F401  (a fixture)
from distributed.resuming import EVERY, LAST_OF_RANK_1, STEPS

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("resuming.py")


def test_a_killed_rank_resumes(ranks, tmp_path):  # noqa: F811
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("--max-restarts=1", str(SCRIPT), str(tmp_path)),
    ]
    paths = [str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "SIGKILL" in run.stderr or "-9" in run.stderr
    assert (tmp_path / "latest").read_text() == str(STEPS // EVERY * EVERY)
    assert LAST_OF_RANK_1 % EVERY == 1  # a step after the last checkpoint was lost
    found = torch.load(tmp_path / "weights.pt")
    undisturbed = ranks[SECOND][0]["undisturbed"]
    assert found.keys() == undisturbed.keys()
    for name, weight in undisturbed.items():
        assert torch.equal(found[name], weight), name
