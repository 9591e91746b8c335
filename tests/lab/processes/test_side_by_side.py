"""A pool of processes: results, and the death of a worker."""

from __future__ import annotations

import pytest

from rootfree_lab.processes.side_by_side import Event, each

KILL = "__import__('os').kill(__import__('os').getpid(), 9)"


@pytest.mark.slow
def test_a_worker_that_dies_takes_nothing_with_it():
    results = dict(each(eval, ["1 + 1", KILL, "2 + 2"], 1))
    died = results.pop(KILL)
    assert results == {"1 + 1": 2, "2 + 2": 4}
    assert isinstance(died, Event)
    assert died.content == "its process was ended by SIGKILL"
