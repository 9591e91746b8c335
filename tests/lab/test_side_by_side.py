"""A pool of processes: results, deaths, and a worker whose owner is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from rootfree_lab.side_by_side import Event, each

pytestmark = pytest.mark.slow

KILL = "__import__('os').kill(__import__('os').getpid(), 9)"

OWNER = """
import os, time
from rootfree_lab.side_by_side import Pool
class Tell:
    def __call__(self, item, channel):
        channel.tell(os.getpid())
        time.sleep(60)
if __name__ == "__main__":
    with Pool(Tell(), 1) as pool:
        pool.submit("x")
        while not (events := pool.events(60)):
            pass
        print(events[0].content, flush=True)
        time.sleep(60)
"""


def test_a_worker_that_dies_takes_nothing_with_it():
    results = dict(each(eval, ["1 + 1", KILL, "2 + 2"], 1))
    died = results.pop(KILL)
    assert results == {"1 + 1": 2, "2 + 2": 4}
    assert isinstance(died, Event)
    assert died.content == "its process was ended by SIGKILL"


def test_a_worker_ends_with_its_owner(tmp_path):
    program = tmp_path / "owner.py"
    program.write_text(OWNER)
    owner = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    worker = int(owner.stdout.readline())
    os.kill(worker, 0)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    patience = time.monotonic() + 30
    while time.monotonic() < patience:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the worker outlives its owner")
