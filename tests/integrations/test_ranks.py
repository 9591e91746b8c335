"""Loops as other libraries write them, on two ranks with FSDP2; the Trainer with DDP."""

from __future__ import annotations

import re

import pytest
import torch

from distributed.launch import results
from integrations.needs import needs
from integrations.page import LOOPS

pytestmark = pytest.mark.slow

WORLDS = (2, 1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base  # of all test processes
    return results("integrations.ranks", WORLDS, shared / "integrations")


@pytest.mark.parametrize("loop", LOOPS)
def test_two_ranks_do_what_one_does(ranks, loop):
    (first, second), (alone,) = ranks
    assert all(map(torch.equal, first[loop], second[loop]))
    for a, b in zip(first[loop], alone[loop], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_example_learns_on_both_kinds_of_ranks(ranks):
    (first, second), (alone,) = ranks
    for world, printed in ((2, first["example"]), (1, alone["example"])):
        for each in printed:  # DDP and FSDP2
            last = re.search(rf"{world} ranks, B = 64, test accuracy ([\d.]+) %", each)
            assert last is not None
            assert float(last[1]) > 80
    assert "blocks are shared by 2 ranks" in first["example"][0]
    assert second["example"] == ["", ""]  # one rank speaks


def test_parameters_may_be_swapped_for_their_shards(ranks):
    """As accelerate does it after the optimizer is made; nothing of the whole ones is kept."""
    for rank in (each for world in ranks for each in world):
        (params, states, saved), (others, count, expected) = rank["swapped"], rank["direct"]
        assert all(map(torch.equal, params, others))
        assert states == count == len(params)
        assert all(
            torch.equal(tensor, expected[p][key])
            for p, row in saved.items()
            for key, tensor in row.items()
        )


@needs("transformers", "accelerate")
def test_the_trainer_tells_all_ranks_one_number(ranks):
    (first, second), (alone,) = ranks
    assert first["trainer"] == second["trainer"] != alone["trainer"]
    for used, told in first["trainer"] + alone["trainer"]:
        assert used == told > 1


@needs("lightning")
def test_lightning_adds_up_what_ranks_see(ranks):
    (first, second), (alone,) = ranks
    assert first["lightning"] == second["lightning"] == 2 * [2 * (3 + 5)]
    assert alone["lightning"] == 2 * [2 * 3]
