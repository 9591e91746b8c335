"""What holds for every test: repeatable draws, no clocks, one thread a worker."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Before torch is imported: the workers of a parallel run would otherwise fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# Before Triton is imported: without a GPU its kernels run in its interpreter, where tests ask for
# them with fused=True.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples everywhere, and no deadline: machines are shared, and a slow one is no failure.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def thawed_in_the_end() -> Iterator[None]:
    """At its end the interpreter takes apart what `small_heap` has frozen."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """The garbage collector leaves alone what was there before the tests of a file.

    Thousands of tests and torch are millions of objects, and much of the laboratory collects
    garbage before it measures: half a second each time, for nothing.
    """
    gc.collect()
    gc.freeze()
