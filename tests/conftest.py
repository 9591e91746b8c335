"""What holds for every test: repeatable draws, no clocks, one thread a worker."""

from __future__ import annotations

import os

# Before torch is imported: the workers of a parallel run would otherwise fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# The same examples everywhere, and no deadline: machines are shared, and a slow one is no failure.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
