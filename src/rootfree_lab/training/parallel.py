"""A run on several ranks started by `torchrun`.

Every rank draws the same batches and takes its part of each. So the data, and the checkpoints too,
are those of a single process, whatever the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import rootfree
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.training.feeding import Batch

# The larger parts of torch.distributed are imported on use: a single process needs none of them.


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of the run; it is alone without `train.parallel`."""

    mode: str = "none"
    rank: int = 0
    world: int = 1
    hosts: Any = None  # a process group for tensors on the CPU

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.mode == "none"

    def part(self, batch: Batch) -> Batch:
        """This rank's part of a batch."""
        if self.alone:
            return batch
        rows = len(batch.target) // self.world
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        inputs = tuple(x[mine] for x in batch.inputs)
        return replace(batch, inputs=inputs, target=batch.target[mine])

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model, wrapped or sharded for its kind of parallelism."""
        if self.mode == "ddp":
            return DistributedDataParallel(model)
        if self.mode in ("fsdp2", "hsdp"):
            from torch.distributed.fsdp import fully_shard

            mesh = self._mesh(next(model.parameters()).device.type)
            for blocks in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
                for block in blocks:
                    fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def _mesh(self, kind: str) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        if self.mode == "fsdp2":
            return init_device_mesh(kind, (self.world,))
        nodes = self.world // int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        replicas = nodes if nodes > 1 else 2
        shape, names = (replicas, self.world // replicas), ("replicate", "shard")
        return init_device_mesh(kind, shape, mesh_dim_names=names)

    def largest(self, number: int) -> int:
        """The largest number of all ranks; exchanged between hosts, so that no device waits."""
        if self.alone:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.hosts)
        return int(found)

    def add_up_(self, *tensors: Tensor) -> None:
        """Replace tensors by their sums over the ranks."""
        for tensor in tensors if not self.alone else ():
            dist.all_reduce(tensor)

    def gathered(self, content: Any) -> list[Any]:
        """The content of every rank, in the order of the ranks."""
        found: list[Any] = [content] * self.world
        if not self.alone:
            dist.all_gather_object(found, content, group=self.hosts)
        return found

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The full state of the model, as a single process has it. All ranks must call this."""
        if self.alone:
            return model.state_dict()
        from torch.distributed.checkpoint import state_dict as states

        return states.get_model_state_dict(
            model, options=states.StateDictOptions(full_state_dict=True)
        )

    def load_model(self, model: nn.Module, state: dict[str, Any]) -> None:
        """Load a state that `model_state` returned."""
        if self.alone:
            model.load_state_dict(state)
            return
        from torch.distributed.checkpoint import state_dict as states

        states.set_model_state_dict(
            model, state, options=states.StateDictOptions(full_state_dict=True)
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state of an optimizer, as a single process has it. All ranks must call this."""
        return optimizer.state_dict() if self.alone else rootfree.full_state_dict(optimizer)

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a state that `optimizer_state` returned."""
        if not self.alone and not isinstance(optimizer, rootfree.RootFreeOptimizer):
            state = _sharded_like(optimizer, state)
        optimizer.load_state_dict(dict(state))


def _sharded_like(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state sharded like the parameters, for optimizers of torch, which do not shard it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    params = [p for group in optimizer.param_groups for p in group["params"]]
    rows = {}
    for number, row in state["state"].items():
        p, rows[number] = params[number], dict(row)
        for key, value in row.items():
            if isinstance(p, DTensor) and isinstance(value, Tensor) and value.shape == p.shape:
                rows[number][key] = distribute_tensor(
                    value.to(p.device), p.device_mesh, p.placements, src_data_rank=None
                )
    return {**state, "state": rows}


def start(mode: str, device: torch.device, *, batch_size: int) -> tuple[Ranks, torch.device]:
    """Connect the ranks of a run; they, and the device of this one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if mode == "none":
        if world > 1:
            raise ConfigError(
                f"train.parallel must be ddp, fsdp2 or hsdp under torchrun with {world} processes, "
                "got 'none'"
            )
        return Ranks(), device
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ConfigError(
                f"train.parallel = {mode!r} needs torchrun: "
                "torchrun --nproc-per-node=N -m rootfree_lab train CONFIG"
            )
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        _connect("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    if batch_size % world:
        raise ConfigError(
            f"train.batch_size must be a multiple of the number of ranks, {world}, got {batch_size}"
        )
    if mode == "hsdp" and world % 2:
        raise ConfigError(f"train.parallel = 'hsdp' needs an even number of ranks, got {world}")
    return Ranks(mode, dist.get_rank(), world, dist.group.WORLD), device


def _connect(backend: str) -> None:
    """Connect with the other ranks of this start.

    After a restart, torchrun's store may still have the addresses of ranks that have died.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://"))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    mine = dist.PrefixStore(f"start {start}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=mine, rank=rank, world_size=world)


def speaks() -> bool:
    """Whether this process prints: only the first of those that torchrun started does."""
    return int(os.environ.get("RANK", "0")) == 0
