"""Two ranks on one device that gloo connects, against one process; see test_gloo_gpu.py.

Run as a script: gloo_gpu.py RANK ADDRESS DEVICE.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rootfree

WORLD, STEPS, BATCH = 2, 3, 8
#: dtype, and whether kernels may run
KINDS = {"fp64": (torch.float64, False), "kernels": (torch.float32, None)}
METHODS = {"IFShampoo": rootfree.IFShampoo, "RFRMSprop": rootfree.RFRMSprop}
State = dict[int, dict[str, torch.Tensor]]


def network(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 7), nn.Tanh(), nn.Linear(7, 1)]
    return nn.Sequential(*layers).to(device, dtype)


def train(model: nn.Module, optimizer: Any, part: tuple[int, int] = (0, 1)) -> None:
    generator = torch.Generator().manual_seed(1)
    number, count = part
    like = next(model.parameters())
    for _ in range(STEPS):
        x = torch.randn(BATCH, 24, generator=generator, dtype=torch.float64)
        x = x[number * BATCH // count : (number + 1) * BATCH // count]
        optimizer.zero_grad()
        model(x.to(like.device, like.dtype)).square().mean().backward()
        optimizer.step()


def distance(found: State, expected: State) -> float:
    """The largest difference, relative to the largest number of a tensor."""
    far = 0.0
    for n, row in expected.items():
        for key, t in row.items():
            whole = t.double()
            scale = max(1.0, whole.abs().max().item())
            far = max(far, (found[n][key].double() - whole).abs().max().item() / scale)
    return far


def compared(device: str, rank: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """How far whole states are from those of one process, and from themselves after loading."""
    for kind, (dtype, fused) in KINDS.items():
        for name, method in METHODS.items():
            options: dict[str, Any] = {"lr": 1e-2, "batch_size": BATCH, "fused": fused}
            alone = network(device, dtype)
            reference = method(alone.parameters(), **options)
            train(alone, reference)
            expected = rootfree.full_state_dict(reference)["state"]
            for mode in ("fsdp2", "sharded"):
                model, given = network(device, dtype), dict(options)
                if mode == "fsdp2":
                    # init_device_mesh connects GPUs by NCCL, which refuses two ranks on one.
                    everyone = dist.group.WORLD
                    mesh = DeviceMesh.from_group(everyone, torch.device(device).type)
                    fully_shard(model, mesh=mesh)
                else:
                    model = DistributedDataParallel(model)
                    if method is rootfree.IFShampoo:
                        given["placement"] = rootfree.Sharded()
                optimizer = method(model.parameters(), **given)
                train(model, optimizer, (rank, WORLD))
                saved = rootfree.full_state_dict(optimizer)
                optimizer.load_state_dict(saved)
                again = rootfree.full_state_dict(optimizer)["state"]
                far = distance(saved["state"], expected), distance(again, saved["state"])
                yield f"{kind} {name} {mode}", far


def main(rank: int, address: str, device: str) -> None:
    faulthandler.enable()  # a crash says where
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    print(json.dumps(dict(compared(device, rank))), flush=True)
    dist.barrier()
    # gloo's threads now and then abort the shutdown of the interpreter; there is nothing to close.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
