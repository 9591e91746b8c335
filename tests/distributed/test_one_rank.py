"""At world size 1 the step is that of plain tensors: the same operations, bit for bit."""

from __future__ import annotations

import pytest
import torch

from distributed.models import network
from distributed.program import THIRD, ranks  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow

# Calls of Python that may be added for each parameter and for the step: looking up its local part.
FOR_EACH, FOR_ALL = 5, 16


def test_a_rank_without_others_steps_like_plain_tensors(ranks):  # noqa: F811
    (found,) = ranks[THIRD]
    count = len(list(network().parameters()))
    for method, kinds in found["one rank"].items():
        plain = kinds["plain"]
        for kind, other in kinds.items():
            assert other["stacks"] == plain["stacks"], (method, kind)
            if method != "kernels":  # addresses decide how many programs these run
                assert other["operations"] == plain["operations"], (method, kind)
                assert other["operations"].total() > 20
                assert other["calls"] <= plain["calls"] + FOR_EACH * count + FOR_ALL, (method, kind)
            for name, weight in plain["weights"].items():
                assert torch.equal(other["weights"][name], weight), (method, kind, name)


def test_its_checkpoints_are_those_of_many_ranks(ranks):  # noqa: F811
    """Factors and momentum are DTensors where parameters are."""
    (found,) = ranks[THIRD]
    for method, kinds in found["one rank"].items():
        shared = dict(kinds["fsdp2"]["saved"])
        assert not any(kinds["plain"]["saved"].values())
        steps = [key for key in shared if key.endswith(".step")]  # plain numbers
        assert not any(shared.pop(key) for key in steps)
        assert all(shared.values()), (method, shared)
        assert len(shared) > 0
