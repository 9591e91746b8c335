"""Sums over the ranks that average gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rootfree.placement.local import is_sharded
from rootfree.placement.processes import host_group, initialised, ranks_of_mesh
from rootfree.placement.unsharded import fsdp_groups

#: the loss terms of a step, given those that were counted here
Total = Callable[[int], int]


@dataclass(frozen=True)
class Multiple:
    """As many on each of `size` ranks."""

    size: int

    def __call__(self, here: int) -> int:
        return here * self.size


class DataParallelSum:
    """The sum of what the data-parallel ranks counted, made on the hosts: no device waits."""

    def __init__(self, model: nn.Module, process_group: Any) -> None:
        self._model, self._given = model, process_group
        self._ranks: list[int] | None = None
        self._group: Any = None

    def __call__(self, here: int) -> int:
        if not initialised():
            return here
        if self._ranks is None:  # at the first step: the model may be sharded after it is tracked
            self._ranks = data_parallel_ranks(self._model, self._given)
        if len(self._ranks) == 1:
            return here
        if self._group is None:
            self._group = host_group(self._ranks)
        total = torch.tensor(here)
        torch.distributed.all_reduce(total, group=self._group)
        return int(total)


def data_parallel_ranks(model: nn.Module, given: Any = None) -> list[int]:
    """The ranks that see other data than this one and average gradients with it."""
    distributed = torch.distributed
    if hasattr(given, "mesh"):  # a DeviceMesh
        return sorted(given.mesh.flatten().tolist())
    if given is not None:
        return list(distributed.get_process_group_ranks(given))
    for group in fsdp_groups(model):
        info = group.mesh_info
        dims = {info.shard_mesh_dim, info.replicate_mesh_dim} - {None}
        return ranks_of_mesh(info.mesh, dims)
    params: list[Any] = list(model.parameters())
    meshes = [p.device_mesh for p in params if is_sharded(p)]
    if not meshes:
        return list(range(distributed.get_world_size()))
    if all(mesh.size() == distributed.get_world_size() for mesh in meshes):
        return [distributed.get_rank()]  # tensor parallelism alone: one batch for all
    raise RuntimeError(
        "track_batch_size cannot tell which ranks average gradients: parameters are sharded over "
        f"{meshes[0].size()} of {distributed.get_world_size()} ranks, and not by fully_shard. Give "
        "process_group=..., for instance mesh['dp']"
    )
