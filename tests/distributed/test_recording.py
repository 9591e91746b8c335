"""Recorders on four ranks give every method what one process gives it."""

from __future__ import annotations

import pytest

from distributed import recording
from distributed.models import weights
from distributed.program import FIRST, ranks  # noqa: F401  (a fixture)
from distributed.test_same_result import difference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", recording.CASES, ids=" ".join)
def test_unequal_batches_and_a_rank_without_data(ranks, case):  # noqa: F811
    method, recorder, _ = case
    expected = recording.trained(method, recorder, "alone")
    assert difference(weights(recording.network()), expected) > 1e-3
    for rank in ranks[FIRST]:
        assert difference(rank["recorders"][case], expected) < 1e-10


def test_gradients_that_are_summed(ranks):  # noqa: F811
    expected = recording.summed("alone")
    for rank in ranks[FIRST]:
        assert difference(rank["recorders"]["summed"], expected) < 1e-10


def test_weights_that_hooks_do_not_see_are_found(ranks):  # noqa: F811
    expected, left_out = recording.used_elsewhere("alone")
    assert left_out == {"per example": True, "KFAC": True}
    for rank in ranks[FIRST]:
        found, there = rank["recorders"]["used elsewhere"]
        assert there == left_out
        assert difference(found, expected) < 1e-10
