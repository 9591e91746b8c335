"""Data-parallel ranks together record what one process does on the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rootfree
from recorders.every_recorder import DETERMINISTIC, RECORDERS, assert_equal, curvatures
from recorders.networks import seeded
from recorders.two_ranks import HALF, Network, half_of_the_batch
from rootfree.recorders import KFACRecorder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has recorded."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("two_ranks.py")
    tests = str(script.parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    files = [str(folder / f"{rank}.pt") for rank in range(2)]
    address = (folder / "rendezvous").as_uri()
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), address, file],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank, file in enumerate(files)
    ]
    for process in processes:
        try:
            _, err = process.communicate(timeout=180)
        finally:
            process.kill()
        assert process.returncode == 0, err
    return [torch.load(file) for file in files]


@pytest.mark.parametrize("name", RECORDERS)
def test_ranks_agree(name: str, ranks: list[dict[str, Any]]) -> None:
    assert_equal(ranks[0][name], ranks[1][name], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_ranks_record_what_one_process_does(name: str, ranks: list[dict[str, Any]]) -> None:
    model = seeded(Network)
    recorder = RECORDERS[name](model)
    with recorder:
        for k in range(2):
            x, y = half_of_the_batch(k)
            z = model(x, k == 0)
            recorder.backward(nn.functional.cross_entropy(z, y, reduction="sum") / (2 * HALF), z)
    assert_equal(ranks[0][name], curvatures(recorder, model, batch_size=2 * HALF))


@pytest.mark.parametrize(
    ("name", "weight"), [("MonteCarloFisherRecorder", 0.5**0.5), ("HutchinsonDiagonal", 0.5)]
)
def test_draws_of_the_ranks_differ_and_add_up(
    name: str, weight: float, ranks: list[dict[str, Any]]
) -> None:
    """Sampled gradients are sums over examples divided by √B; Hessians of averages are averaged."""
    alone = [rank[f"{name} alone"] for rank in ranks]
    assert not torch.allclose(*alone)
    for rank in ranks:
        torch.testing.assert_close(rank[f"{name} world"], weight * (alone[0] + alone[1]))


def test_ranks_train_as_one_process_does(ranks: list[dict[str, Any]]) -> None:
    model = seeded(Network)
    recorder = KFACRecorder(model)
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=2 * HALF, curvature=recorder)
    halves = [half_of_the_batch(k) for k in range(2)]
    x, y = (torch.cat(parts) for parts in zip(*halves, strict=True))
    for _ in range(3):
        optimizer.zero_grad()
        with recorder:
            nn.functional.cross_entropy(model(x, True), y).backward()
        optimizer.step()
    trained = {n: [p.detach()] for n, p in model.named_parameters()}
    assert_equal(ranks[0]["trained"], trained, rtol=1e-9, atol=1e-12)
    assert_equal(ranks[1]["trained"], trained, rtol=1e-9, atol=1e-12)
