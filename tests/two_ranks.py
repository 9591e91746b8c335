"""One of two data-parallel ranks; run as a script by test_batch_size.py.

Arguments: rank, address of the process group. Prints, as JSON, the batch sizes of two steps for
each thing to track.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rootfree


def batch_sizes(tracked: str) -> list[int]:
    torch.manual_seed(0)
    inner = nn.Linear(3, 1)
    model = DistributedDataParallel(inner)
    optimizer = rootfree.RFRMSprop(inner.parameters(), lr=0.01)
    size = 1 if tracked == "data_parallel_size=1" else None
    target = inner if tracked == "inner" else model
    rootfree.track_batch_size(target, optimizer, data_parallel_size=size)
    seen = []
    for micro_batches in ([8], [4, 3]):
        optimizer.zero_grad()
        for length in micro_batches[:-1]:
            with model.no_sync():
                model(torch.randn(length, 3)).square().mean().backward()
        model(torch.randn(micro_batches[-1], 3)).square().mean().backward()
        optimizer.step()
        seen.append(optimizer.batch_size)
    return seen


def main(rank: int, address: str) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    seen = {what: batch_sizes(what) for what in ("wrapper", "inner", "data_parallel_size=1")}
    dist.barrier()
    print(json.dumps(seen), flush=True)
    # gloo's threads now and then abort the shutdown of the interpreter; there is nothing to close.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
