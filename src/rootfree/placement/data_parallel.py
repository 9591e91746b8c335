"""The ranks that average gradients, and sums over them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rootfree.placement.local import is_sharded
from rootfree.placement.meeting import announce, unannounced
from rootfree.placement.processes import host_group, initialised, ranks_of_mesh
from rootfree.placement.ranks import PlacementError
from rootfree.placement.unsharded import fsdp_groups

_COUNTING = "track_batch_size"


class DataParallelSum:
    """The sum of the counts of data-parallel ranks, computed on the hosts: no device waits."""

    def __init__(self, model: nn.Module, process_group: Any) -> None:
        self._model, self._given = model, process_group
        self._ranks: list[int] | None = None
        self._missing: list[int] = []  # ranks that do not count
        self._group: Any = None
        announce(_COUNTING)

    def __call__(self, here: int) -> int:
        if not initialised():
            return here
        if self._ranks is None:  # at the first step: the model may be sharded after it is tracked
            self._ranks = data_parallel_ranks(self._model, self._given)
            self._missing = unannounced(_COUNTING, self._ranks)
        if self._missing:
            raise PlacementError(
                f"{_COUNTING}: rank {torch.distributed.get_rank()} counts loss terms, rank "
                f"{self._missing[0]} does not. Call it on all ranks that average gradients, or on "
                "none"
            )
        if len(self._ranks) == 1:
            return here
        if self._group is None:
            self._group = host_group(self._ranks)
        total = torch.tensor(here, device="cpu")
        torch.distributed.all_reduce(total, group=self._group)
        return int(total)


def data_parallel_ranks(model: nn.Module, given: Any = None) -> list[int]:
    """The ranks that average gradients with this one, including itself."""
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


def copies_under_ddp(params: Iterable[Tensor]) -> dict[tuple[int, ...], dict[int, str]]:
    """Names of the parameters that `DistributedDataParallel` has copies of, by their ids.

    Grouped by the ranks that have the copies.
    """
    wanted = {id(p) for p in params}
    found: dict[tuple[int, ...], dict[int, str]] = {}
    for model in _wrapped():
        named = [(name, p) for name, p in model.module.named_parameters() if id(p) in wanted]
        named = [(name, p) for name, p in named if name not in model.parameters_to_ignore]
        ranks = _ranks_of(model.process_group) if named else ()
        if len(ranks) > 1:
            found.setdefault(ranks, {}).update({id(p): name for name, p in named})
    return found


def _ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a process group; none if it was destroyed."""
    try:
        return tuple(torch.distributed.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return ()


def _wrapped() -> list[DistributedDataParallel]:
    # Neither the model nor its parameters know that DDP wraps them. By `type`, not isinstance:
    # an object may define `__class__` as it likes, or import something to answer.
    return [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
