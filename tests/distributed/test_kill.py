"""A rank is killed in a step or in a save; torchrun's agent starts all again: nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.killing import RESTARTS
from distributed.laboratory import UNDISTURBED, saved
from distributed.program import SECOND, ranks  # noqa: F401  (a fixture)
from distributed.resuming import EVERY, LAST_OF_RANK_1, STEPS
from rootfree_lab.config.files import config_from
from rootfree_lab.files.records import read_records
from rootfree_lab.files.weights import weights_path
from rootfree_lab.training.run import records_path

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both runs, whose ranks were killed and started again."""
    folder = tmp_path_factory.mktemp("killed")
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, str(HERE / "killing.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    # The agent names the first that it sees: the killed one, or one that waited for it.
    assert run.stderr.count("failed (exitcode: ") == sum(RESTARTS.values())
    return folder


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_killed_in_a_step_and_in_a_save(ranks, killed):  # noqa: F811
    folder = killed / "resuming"
    assert (folder / "latest").read_text() == str(STEPS // EVERY * EVERY)
    assert LAST_OF_RANK_1 % EVERY == 1  # a step after the last checkpoint was lost
    assert_same(torch.load(folder / "weights.pt"), ranks[SECOND][0]["undisturbed"])


def test_the_laboratory_killed_in_a_save(ranks, killed):  # noqa: F811
    folder = killed / "laboratory"
    (record,) = read_records(records_path(folder))
    assert record["completed"]
    assert not [*folder.glob("checkpoints/*")]  # the half-written one is gone too
    undisturbed = ranks[SECOND][0]["laboratory"][UNDISTURBED]
    assert_same(torch.load(weights_path(folder, config_from(saved()))), undisturbed)
