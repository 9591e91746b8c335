"""What holds for every test: repeatable draws, no clocks, one thread a worker."""

from __future__ import annotations

import os

# Before torch is imported: the workers of a parallel run would otherwise fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

# Before Triton is imported: without a GPU its kernels run in its interpreter, where tests ask for
# them with fused=True.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples everywhere, and no deadline: machines are shared, and a slow one is no failure.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
