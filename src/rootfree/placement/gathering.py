"""Whole tensors from their shards, also where the backend cannot gather them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rootfree.placement.boxes import box_at, whole
from rootfree.placement.exchange import move
from rootfree.placement.local import local, offsets_and_shape
from rootfree.placement.processes import device_group, exchange_device, host_group
from rootfree.placement.routes import make_route


def gathers(t: Any) -> bool:
    """Whether torch itself can gather a DTensor: gloo cannot from GPUs, NCCL not from the CPU.

    gloo does not refuse: it reads the GPU's memory as host memory, and the process dies of a
    segmentation fault (pytorch issue 152645).
    """
    mesh, device = t.device_mesh, local(t).device
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return all(exchange_device(group, device) == device for group in groups)


def whole_tensor(t: Any) -> Tensor:
    """A DTensor as one tensor, on the device of its shards. All ranks of its mesh must ask."""
    if gathers(t):
        full: Tensor = t.full_tensor()
        return full
    ranks = sorted(t.device_mesh.mesh.flatten().tolist())
    me, here = ranks.index(torch.distributed.get_rank()), local(t)
    mine, everything = box_at(*offsets_and_shape(t)), whole(t.shape)
    boxes: list[Any] = [None] * len(ranks)
    torch.distributed.all_gather_object(boxes, mine, group=host_group(ranks))
    route = make_route(
        {0: list(enumerate(boxes))},
        {0: [(rank, everything) for rank in range(len(ranks))]},
        me=me,
        world=len(ranks),
    )
    found = torch.empty(t.shape, dtype=here.dtype, device=here.device)
    move(
        route, {(0, mine): here}, {(0, everything): found}, dtype=here.dtype, device=here.device,
        group=device_group(ranks),
    )  # fmt: skip
    return found
