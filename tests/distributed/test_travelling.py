"""Exchanges overlap with the work on other blocks, and change nothing; a vocabulary is shared."""

from __future__ import annotations

import pytest
import torch

from distributed import travelling
from distributed.program import FIRST, SECOND, ranks  # noqa: F401  (a fixture)
from distributed.same_result import alone_for
from rootfree.placement.forecast import forecast

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(ranks):  # noqa: F811
    return [rank["travelling"] for rank in ranks[SECOND]]


@pytest.mark.parametrize("mode", ["fsdp2", "ddp sharded"])
def test_rounds_change_nothing(found, mode):
    expected = alone_for("IFShampoo", travelling.STEPS)
    for rank in found:
        one, many, waiting = (rank[f"rounds, {mode}"][kind] for kind in ("one", "many", "waiting"))
        assert many["rounds"] >= 3 * one["rounds"]
        for name, weight in many["weights"].items():
            assert torch.equal(weight, waiting["weights"][name])
            torch.testing.assert_close(weight, one["weights"][name], rtol=0, atol=1e-14)
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)


def in_flight(log):
    """How many exchanges are under way after each event."""
    counts, now = [], 0
    for what, _ in log:
        now += 1 if what == "begun" else -1
        counts.append(now)
    return counts


def test_exchanges_overlap_with_work(found):
    """While a round is worked on, the next comes and the last one leaves, and no more."""
    for rank in found:
        log = rank["rounds, fsdp2"]["many"]["log"]
        counts = in_flight(log)
        assert counts[-1] == 0
        assert max(counts) == 3
        # Directions of the first round are sent when gradients of the second are under way, and
        # are waited for after those of the third were asked for.
        assert log[:3] == [("begun", 0), ("begun", 1), ("landed", 0)]
        assert log.index(("landed", 2)) > log.index(("begun", 3))
        assert max(in_flight(rank["rounds, ddp sharded"]["many"]["log"])) == 2


def test_what_travels_is_counted(found):
    """All ranks together receive what they send; whole gradients do not travel."""
    for mode, kinds in (("fsdp2", {"gradients", "directions"}), ("ddp sharded", {"parameters"})):
        runs = [rank[f"rounds, {mode}"]["many"] for rank in found]
        for what in kinds:
            sent, received = (
                sum(getattr(run["traffic"], way)[what] for run in runs)
                for way in ("sent", "received")
            )
            assert sent == received > 0
        for run in runs:
            assert {*run["traffic"].sent} == {*kinds, "sums"}
            begun = sum(what == "begun" for what, _ in run["log"])
            assert run["rounds"] == begun
            assert run["traffic"].waited > 0
            line = run["summary"].splitlines()[-1]
            assert f"in {begun / len(travelling.STEPS):.3g} rounds" in line
            assert "received: " in line


def test_whole_tensors_without_torchs_gathering(ranks):  # noqa: F811
    """As on GPUs that gloo connects."""
    for rank in ranks[FIRST]:
        numbers, found, by_hand, by_torch = rank["gathered"]
        assert len(found) == 5
        assert all(torch.equal(each, numbers) for each in found)
        for n, row in by_torch.items():
            assert by_hand[n].keys() == row.keys()
            assert all(torch.equal(by_hand[n][key], tensor) for key, tensor in row.items())


@pytest.mark.parametrize("kind", ["sharded", "whole"])
def test_ranks_share_a_vocabulary(found, kind):
    expected, *_ = travelling.vocabulary("alone")
    for rank in found:
        there, owners, _ = rank[f"vocabulary, {kind}"]
        assert {*owners} == {0, 1}
        torch.testing.assert_close(there, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kind", "sharding"), [("sharded", "fsdp2"), ("whole", "ddp")])
def test_a_forecast_says_what_happens(found, kind, sharding):
    sizes = {f"{what}_bytes": 8 for what in ("product", "parameter", "factor", "momentum")}
    told = forecast(
        [(50, 6)], world=2, block_size=8, structures=[("diagonal", "dense")], sharding=sharding,
        **sizes,
    )  # fmt: skip
    for number, rank in enumerate(found):
        _, owners, counts = rank[f"vocabulary, {kind}"]
        assert [owners] == told.owners
        assert counts["sent"] > 0
        for what, count in counts.items():
            assert count == getattr(told, what)[number], (kind, what)
