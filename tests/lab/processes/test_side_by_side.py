"""A pool of processes: results, and the death of a worker."""

from __future__ import annotations

import pytest

from rootfree_lab.processes.side_by_side import each

KILL = "__import__('os').kill(__import__('os').getpid(), 9)"


def evaluated(text, channel):
    return eval(text)


@pytest.mark.slow
def test_a_worker_that_dies_takes_nothing_with_it():
    results = dict(each(evaluated, ["1 + 1", KILL, "2 + 2"], 1))
    assert results == {"1 + 1": 2, "2 + 2": 4, KILL: "its process was ended by SIGKILL"}
