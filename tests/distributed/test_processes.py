"""Process groups that the library makes for itself."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from rootfree.placement.processes import _new_group


def test_ranks_wait_as_long_as_the_user_said():
    """Not torch's default of half an hour."""
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        group = _new_group(dist.group.WORLD, (0,), "gloo")
        assert group._get_backend(torch.device("cpu")).options._timeout == limit
    finally:
        dist.destroy_process_group()
