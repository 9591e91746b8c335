"""Ranks have one batch size, and one mind: where they do not, all raise the same error."""

from __future__ import annotations

import pytest

from distributed import found_alone, under_ddp
from distributed.agreement import UNEQUAL
from distributed.models import BATCH
from distributed.program import LAST, ranks  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow

# what is said, by the case in agreement.py
SAID = {
    "other rate": "step(): lr of parameter group 0 must be the same on all ranks, got 0.1 on rank "
    "0 and 0.2 on rank 2",
    "other shapes": "shape, dtype, device and blocks of parameter 1 must be the same",
    "other options": "damping must be the same on all ranks, got 0.0001 on rank 0 and 0.001 on",
    "one more parameter": "the number of parameters must be the same on all ranks, got 2 on rank 0 "
    "and 3 on rank 2",
    "other names": "the names of the parameters must be the same on all ranks, got ['a', 'b'] on "
    "rank 0 and ['b', 'a'] on rank 1",
    "bad option": "damping must be in [0, inf), got -1.0",
    "bad option of shards": "batch_size must be a positive integer, got 0",
    "other replicas": "placement must be the same on all ranks, got 'Sharded(replicas=2)' on rank "
    "0 and 'Sharded(replicas=None)' on rank 1",
    "missing shard": "__2_0.distcp",
    "one more group": "not at the same point of the program (rank 0: adding a parameter group, "
    "rank 1: step()",
    "one more step": "step of parameter group 0 must be the same on all ranks",
    "save or step": "not at the same point of the program (rank 0: step(), rank 1: state_dict()",
    "missing state": "the checkpoint has no state for parameter 1",
    "other state": "'block0.factor0' of a parameter of shape (6, 4) has shape (1, 7, 7), but must",
    "too small a mesh": "the mesh must cover the parameters",
    "three replicas": "replicas must divide the number of ranks, 4, got 3",
    "split layers": "parameter wide.weight is split by tensor parallelism",
    "second derivatives": "HutchinsonDiagonal differentiates twice, which FSDP2 does not support",
    "joint pairs": "curvature must not treat a weight and its bias as one matrix where ranks share",
    "joint shards": "curvature must not treat a weight and its bias as one matrix where ranks sha",
    "recorded elsewhere": "has recorded no backward pass since the last step",
    "no average": "says that the loss is an average, but its gradient is at least 2 times that",
    "a destroyed process group": "needs the process group, which was destroyed",
    "destroyed on one": "step()",  # and either that it was destroyed, or that a rank is gone
    "destroyed, by elements": "needs the process group, which was destroyed",
    **{case: text for case, (_, text) in {**found_alone.CASES, **under_ddp.CASES}.items()},
}


def test_the_same_error_on_every_rank(ranks):  # noqa: F811
    world = [rank["errors"] for rank in ranks[LAST]]
    assert {*world[0]} == {*SAID}
    for case, text in SAID.items():
        for errors in world:
            _, said, seconds = errors[case]
            assert text in said, (case, said)
            assert seconds < 30


def test_ranks_may_have_optimizers_of_their_own(ranks):  # noqa: F811
    assert all(rank["no false alarms"] for rank in ranks[LAST])


def test_right_programs_under_ddp_notice_nothing(ranks):  # noqa: F811
    """Also where ranks have divided the parameters among themselves."""
    expected, calls = under_ddp.alone()
    for rank in ranks[LAST]:
        assert rank["undisturbed"]["copies"][1] == calls
        for kind, (weights, _) in rank["undisturbed"].items():
            for name, w in weights.items():
                assert (w - expected[name]).abs().max() < 1e-12, (kind, name)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("counted later", "track_batch_size: rank 1 counts loss terms, rank 0 does not"),
        ("added later", "they have not added the same parameters"),
    ],
)
def test_a_rank_that_does_something_alone_after_the_first_step_says_so(ranks, case, text):  # noqa: F811
    said = [rank[case] for rank in ranks[LAST]]
    assert text in said[1]
    assert said[0] == said[2] == said[3] == ""


def test_one_batch_size_for_all(ranks):  # noqa: F811
    for rank in ranks[LAST]:
        found = rank["batch sizes"]
        for mode in ("ddp", "fsdp2", "hsdp", "tp", "fsdp2+tp"):
            assert found[mode] == [BATCH], mode
        for mode in ("ddp", "fsdp2"):
            assert found[f"{mode}, unequal"] == [sum(UNEQUAL)]
