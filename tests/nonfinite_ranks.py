"""One of two ranks with sharded parameters; run as a script by test_nonfinite.py.

Arguments: rank, address of the process group. Prints, as JSON, for each way to decide: how many
steps were left out, and whether the parameters stayed finite; and whether diagnostics are right.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rootfree
from rootfree.shell import gradients


def told_alone(rank: int, sharded: Callable[[torch.Tensor], torch.Tensor]) -> list[bool]:
    """Whether each rank, asking alone, is told of its own part: diagonal and matrix methods."""
    right = []
    for method in (rootfree.RFRMSprop, rootfree.IFShampoo):
        p = nn.Parameter(sharded(torch.arange(24.0).view(6, 4)))
        optimizer = method([p], batch_size=1)
        p.grad = sharded(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
        optimizer.step()
        for asks in range(2):
            if asks == rank:
                (mine,) = optimizer.diagnostics().read()
                here = p.detach().to_local()
                gradient = p.grad.to_local().norm().item()
                right.append(
                    mine.shape == tuple(here.shape)
                    and math.isclose(mine.parameter_norm, here.norm().item(), rel_tol=1e-5)
                    and math.isclose(mine.gradient_norm, gradient, rel_tol=1e-5)
                    and 0 < mine.update_ratio < 1
                    and all(math.isfinite(f.condition) for f in mine.factors)
                )
            dist.barrier()
    return right


def main(rank: int, address: str) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def sharded(t: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(t, mesh, [Shard(0)])

    seen = {}
    for way in ("host", "device"):
        if way == "device":
            gradients.host_reads = lambda device: False
        # The second rank has nothing of the second parameter.
        p, q = nn.Parameter(sharded(torch.ones(3, 4))), nn.Parameter(sharded(torch.ones(1)))
        optimizer = rootfree.RFRMSprop([p, q], batch_size=1)
        for bad in (1.0, math.nan, 1.0):
            g = torch.ones(3, 4)
            g[2, 0] = bad  # on the second rank
            p.grad, q.grad = sharded(g), sharded(torch.ones(1))
            optimizer.step()
        finite = all(bool(t.to_local().isfinite().all()) for t in (p, q))
        seen[way] = [optimizer.skipped_steps, finite]
    seen["diagnostics"] = told_alone(rank, sharded)
    dist.barrier()
    print(json.dumps(seen), flush=True)
    # gloo's threads now and then abort the shutdown of the interpreter; there is nothing to close.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
