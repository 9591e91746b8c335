"""A rank is killed in a step or in a save; torchrun starts all again, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.laboratory import UNDISTURBED, saved
from distributed.program import SECOND, ranks  # noqa: F401  (a fixture)
from distributed.resuming import EVERY, LAST_OF_RANK_1, STEPS
from rootfree_lab.config_files import config_from
from rootfree_lab.records import read_records
from rootfree_lab.toml_writing import toml
from rootfree_lab.training import records_path
from rootfree_lab.weights import weights_path

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def torchrun(restarts: int, *command: str) -> str:
    """What two ranks said, which torchrun started again so many times."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", f"--max-restarts={restarts}", *command),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stderr.count("exitcode: -9") == restarts
    return run.stderr


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_killed_in_a_step_and_in_a_save(ranks, tmp_path):  # noqa: F811
    torchrun(2, str(HERE / "resuming.py"), str(tmp_path))
    assert (tmp_path / "latest").read_text() == str(STEPS // EVERY * EVERY)
    assert LAST_OF_RANK_1 % EVERY == 1  # a step after the last checkpoint was lost
    assert_same(torch.load(tmp_path / "weights.pt"), ranks[SECOND][0]["undisturbed"])


def test_the_laboratory_killed_in_a_save(ranks, tmp_path):  # noqa: F811
    (tmp_path / "run.toml").write_text(toml(saved()))
    arguments = ["train", str(tmp_path / "run.toml"), "--resume", "--out", str(tmp_path)]
    torchrun(1, str(HERE / "killed_laboratory.py"), *arguments)
    (record,) = read_records(records_path(tmp_path))
    assert record["completed"]
    assert not [*tmp_path.glob("checkpoints/*")]  # the half-written one is gone too
    undisturbed = ranks[SECOND][0]["laboratory"][UNDISTURBED]
    assert_same(torch.load(weights_path(tmp_path, config_from(saved()))), undisturbed)
