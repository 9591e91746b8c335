"""Networks and batches for ranks, and the kinds of parallelism that they are trained under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

BATCH = 8


class Network(nn.Module):
    """A convolution, matrices cut into several blocks, an uneven one, and one with fewer rows than
    there are ranks: empty shards."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.wide = nn.Linear(24, 40)
        self.odd = nn.Linear(40, 7)
        self.few = nn.Linear(7, 2)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        return self.few(torch.tanh(self.odd(torch.tanh(self.wide(x)))))


def network(dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(0)
    return Network().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(BATCH, 2, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def whole(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def fsdp2(model: nn.Module) -> nn.Module:
    return _sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(model: nn.Module) -> nn.Module:
    shape, names = (2, dist.get_world_size() // 2), ("replicate", "shard")
    return _sharded(model, init_device_mesh("cpu", shape, mesh_dim_names=names))


def _sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for name in ("conv", "wide", "odd"):
        fully_shard(model.get_submodule(name), mesh=mesh)
    return fully_shard(model, mesh=mesh)


PLAN = {"wide": ColwiseParallel, "odd": RowwiseParallel}


def tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {name: kind() for name, kind in PLAN.items()})


def fsdp2_tp(model: nn.Module) -> nn.Module:
    size = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (size, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {name: kind() for name, kind in PLAN.items()})
    return _sharded(model, mesh["dp"])


MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp, "ddp sharded": ddp, "fsdp2": fsdp2, "hsdp": hsdp, "tp": tp, "fsdp2+tp": fsdp2_tp,
}  # fmt: skip


def data_ranks(mode: str) -> tuple[int, int]:
    """(number, how many): the part of the batch that this rank sees."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if mode == "tp":
        return 0, 1
    if mode == "fsdp2+tp":
        return rank // 2, max(world // 2, 1)
    return rank, world


def train(
    model: nn.Module, optimizer: Any, steps: range, *, part: tuple[int, int] = (0, 1)
) -> None:
    number, count = part
    for step in steps:
        x, y = batch(step, next(model.parameters()).dtype)
        rows = slice(number * BATCH // count, (number + 1) * BATCH // count)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()


def full(t: Any) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): full(p) for n, p in model.named_parameters()}
