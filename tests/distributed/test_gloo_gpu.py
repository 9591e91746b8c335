"""Whole state where gloo connects ranks on a GPU: torch's own gathering crashes there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.gloo_gpu import KINDS, METHODS, WORLD

DEVICE = "cuda:0"
# Products of kernels are in bfloat16, and ranks add up gradients in another order.
TOLERANCE = {"fp64": 1e-10, "kernels": 5e-2}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_gloo_ranks_on_one_gpu(tmp_path):
    script, address = Path(__file__).with_name("gloo_gpu.py"), (tmp_path / "rendezvous").as_uri()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), address, DEVICE], stdout=subprocess.PIPE
        )
        for rank in range(WORLD)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0
        found = json.loads(said)
        assert len(found) == 2 * len(KINDS) * len(METHODS)
        for case, (far, after_loading) in found.items():
            assert far <= TOLERANCE[case.split()[0]], case
            assert after_loading == 0.0, case
