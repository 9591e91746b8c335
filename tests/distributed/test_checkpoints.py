"""A checkpoint fits every number of ranks and every kind of parallelism, bit for bit."""

from __future__ import annotations

import pytest
import torch

from distributed.checkpoints import STEPS, TURNS, made
from distributed.models import train, weights
from distributed.program import FIRST, ranks  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow


def assert_equal_states(mine, theirs):
    assert mine["state"].keys() == theirs["state"].keys()
    for number, row in theirs["state"].items():
        assert {key: t.shape for key, t in row.items()} == {
            key: t.shape for key, t in mine["state"][number].items()
        }
        for key, tensor in row.items():
            assert torch.equal(mine["state"][number][key], tensor), (number, key)
            assert mine["state"][number][key].dtype == tensor.dtype


def test_from_world_to_world(ranks):  # noqa: F811
    """FSDP2 on 4 ranks, DDP on 2, one process, HSDP on 4: what is loaded is what was saved."""
    for turn in range(1, len(TURNS)):
        saved_state, saved_weights = ranks[turn - 1][0]["checkpoints"]["saved"]
        for rank in ranks[turn]:
            state, found = rank["checkpoints"]["loaded"]
            assert_equal_states(state, saved_state)
            for name, weight in saved_weights.items():
                assert torch.equal(found[name], weight), name


def test_training_goes_on_as_if_nothing_had_happened(ranks):  # noqa: F811
    model, optimizer = made("alone")
    train(model, optimizer, range(STEPS * len(TURNS)))
    for rank in ranks[-1]:
        _, found = rank["checkpoints"]["saved"]
        for name, weight in weights(model).items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-10)


def test_between_modes(ranks):  # noqa: F811
    for rank in ranks[FIRST]:
        saved, _ = rank["checkpoints"]["saved"]
        assert len(rank["checkpoints"]["between modes"]) == 6
        for state in rank["checkpoints"]["between modes"].values():
            assert_equal_states(state, saved)


def test_one_process_has_the_same_form(ranks):  # noqa: F811
    _, optimizer = made("alone")
    optimizer.load_state_dict(ranks[FIRST][0]["checkpoints"]["saved"][0])
    assert_equal_states(optimizer.state_dict(), ranks[FIRST][0]["checkpoints"]["saved"][0])
