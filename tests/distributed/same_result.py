"""Ranks train what one process trains; see test_same_result.py."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rootfree
from distributed import methods
from distributed.by_hand import by_hand, missing_gradients, not_finite, set_gradients
from distributed.models import (
    MODES,
    data_ranks,
    full,
    network,
    train,
    weights,
)

WORLDS = (4, 2)
STEPS = range(5)
#: (method, mode) of each world: everything on four ranks for the headline, telling ones for others
RUNS: dict[int, list[tuple[str, str]]] = {
    4: [
        *[("IFShampoo", mode) for mode in MODES if mode != "ddp"],
        *[("IFWhitening", mode) for mode in ("ddp sharded", "fsdp2", "hsdp", "fsdp2+tp")],
        *[("RFShampoo", "fsdp2+tp"), ("IFFullAdagrad", "tp"), ("RFFullAdagrad", "fsdp2")],
        *[("companion", mode) for mode in ("ddp sharded", "fsdp2", "tp")],
        *[("RFRMSprop", mode) for mode in ("fsdp2", "tp", "fsdp2+tp")],
    ],
    2: [
        *[("IFShampoo", mode) for mode in ("ddp", "ddp sharded", "fsdp2", "tp")],
        *[("RFShampoo", "ddp sharded"), ("IFFullAdagrad", "fsdp2")],
    ],
}


def made(method: str, model: nn.Module, **given: Any) -> Any:
    if method == "RFRMSprop":
        return methods.rms_prop(model.parameters())
    if method == "companion":
        return methods.with_companion(model, **given)
    return methods.MATRIX[method](model.parameters(), **given)


def placed(mode: str) -> dict[str, Any]:
    return {"placement": rootfree.Sharded()} if mode == "ddp sharded" else {}


def alone(method: str, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """What one process gets."""
    return alone_for(method, STEPS, dtype)


def alone_for(
    method: str, steps: range, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    model = network(dtype)
    train(model, made(method, model), steps)
    return weights(model)


def run() -> dict[str, Any]:
    found: dict[Any, Any] = {}
    world = dist.get_world_size()
    for method, mode in RUNS[world]:
        found[method, mode] = trained(method, mode)
    if world == 4:
        found["fp32"] = trained("IFShampoo", "fsdp2", torch.float32)["weights"]
        found["two replicas"] = replicas()
        found["missing"] = missing_gradients()
        found["bf16"] = bf16_state()
        found["boxes"] = boxes()
        found["kernels"] = kernels("sharded")
        found["copy"] = copied()
        found["not finite"] = not_finite()
    return found


def no_gathering(self: Any, **_: Any) -> Any:
    raise AssertionError("a whole parameter was gathered")


def trained(method: str, mode: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    model = MODES[mode](network(dtype))
    optimizer = made(method, model, **placed(mode))
    with patch.object(DTensor, "full_tensor", no_gathering):
        train(model, optimizer, STEPS, part=data_ranks(mode))
    found = {"weights": weights(model), "summary": optimizer.summary()}
    if method == "IFShampoo":
        (ranks,) = optimizer._placing.agreement.crews or [None]
        found["sent"] = {} if ranks is None else dict(ranks.traffic.sent)
        found["expected"] = expected_bytes(optimizer)
    return found


def expected_bytes(optimizer: Any) -> dict[str, int]:
    """What this rank sends in a step, counted element by element."""
    total = {"gradients": 0, "directions": 0, "parameters": 0}
    for p in optimizer.param_groups[0]["params"]:
        home = optimizer._placing.homes.get(p)
        if home is None or p.grad is None:
            continue
        me, ranks = home.ranks.me, home.ranks.world
        owner = torch.empty(home.view, dtype=torch.int64)
        for (tile, _), owners in zip(home.cut, home.owners, strict=True):
            grid = torch.tensor(owners).view(*tile.counts, *[1] * len(tile.sizes))
            tile.grid(owner).copy_(grid.expand(*tile.counts, *tile.sizes))
        owner = owner.view(home.shape)
        holds = torch.zeros(ranks, *home.shape, dtype=torch.bool)
        for rank, box in enumerate(home.parts):
            holds[rank][tuple(slice(*edges) for edges in box)] = True
        size = p.element_size()
        for rank in range(ranks):
            wanted = holds[rank] & (owner == me) if rank != me else torch.zeros(())
            what = "parameters" if home.at_owner else "directions"
            total[what] += int(wanted.sum()) * size
        if holds.all(0).all():  # every owner has its gradients
            continue
        for rank in {*range(ranks)} - {me}:
            # the nearest of those that have what the owner has not
            lacks = (owner == rank) & ~holds[rank]
            nearest = sorted(range(ranks), key=lambda r, rank=rank: (abs(r - rank), r))
            for other in nearest:
                total["gradients"] += int((lacks & holds[other]).sum()) * size * (other == me)
                lacks = lacks & ~holds[other]
    return total


def replicas() -> dict[str, Any]:
    """HSDP whose two groups exchange nothing: each has all factors."""
    model = MODES["hsdp"](network())
    mesh = next(model.parameters()).device_mesh
    optimizer = methods.if_shampoo(
        model.parameters(), placement=rootfree.Sharded(mesh=mesh, replicas=2)
    )
    train(model, optimizer, STEPS, part=data_ranks("hsdp"))
    return {"weights": weights(model), "world": optimizer._placing.agreement.crews[0].world}


def in_bf16(method: str, params: list[Any], **given: Any) -> Any:
    if method == "RFRMSprop":
        return rootfree.RFRMSprop(params, batch_size=8, momentum=0.9, state_dtype=methods.BF16)
    bf16 = {"state_dtype": methods.BF16, "factor_dtype": methods.BF16}
    options = {"riemannian_momentum": 0.0, "max_update_rms": None}
    return methods.if_shampoo(params, **bf16, **options, **given)


def kernels(kind: str) -> tuple[list[torch.Tensor], dict[int, Any], bool]:
    """Directions by kernels, with factors in halves."""
    params = by_hand(kind)
    bf16 = {"matmul_dtype": methods.BF16, "fused": kind == "sharded"}
    optimizer = rootfree.IFShampoo(params, lr=1e-2, batch_size=8, block_size=16, **bf16)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    saved = rootfree.full_state_dict(optimizer)["state"]
    states = (t for row in optimizer.state.values() for t in row.values())
    in_halves = any(t.dtype == torch.int16 for t in states)
    return [full(p) for p in params], saved, in_halves


def copied() -> bool:
    """A copy of an optimizer and its parameters goes on like the original."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
    params = by_hand("whole")
    optimizer = methods.if_shampoo(params, placement=rootfree.Sharded(mesh=mesh))
    set_gradients(params, 0)
    optimizer.step()
    others, copy = deepcopy((params, optimizer))
    for each in (params, others):
        set_gradients(each, 1)
    optimizer.step()
    copy.step()
    return all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def bf16_state() -> dict[Any, Any]:
    """The noise of rounding is that of the elements' places in the whole."""
    found = {}
    for method in ("RFRMSprop", "IFShampoo"):
        for kind in ("sharded", "whole"):
            params = by_hand(kind)
            sharded = kind == "whole" and method == "IFShampoo"
            given = {"placement": rootfree.Sharded()} if sharded else {}
            optimizer = in_bf16(method, params, **given)
            for step in range(4):
                set_gradients(params, step)
                optimizer.step()
            saved = rootfree.full_state_dict(optimizer)["state"]
            found[method, kind] = [full(p) for p in params], saved
    return found


def boxes() -> list[tuple[torch.Tensor, Any]]:
    """Local parts of numbered elements, with where they are said to begin."""
    from rootfree.placement.local import offsets_and_shape

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for shape in ((8, 6), (5, 3), (1, 7)):
        numbers = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for placements in (
            (Shard(0), Shard(0)), (Shard(1), Shard(0)), (Shard(0), Shard(1)),
            (Replicate(), Shard(0)), (Shard(1), Replicate()),
        ):  # fmt: skip
            there = distribute_tensor(numbers, mesh, placements)
            found.append((shape, there.to_local(), offsets_and_shape(there)))
    # FSDP2 over tensor parallelism shards the rows of a shard of rows.
    model = MODES["fsdp2+tp"](network())
    weight = dict(model.named_parameters())["wide.weight"]
    whole = network().wide.weight.detach()
    found.append((whole, weight.to_local(), offsets_and_shape(weight)))
    return found
