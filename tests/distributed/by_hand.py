"""Parameters without a model; gradients are given, or missing, or not finite on some ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rootfree
from distributed import methods
from distributed.models import full
from rootfree.placement.local import local

SHAPES = [(40, 24), (7, 5), (2, 3)]


def given_gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(*shape, generator=generator) for shape in SHAPES]


def by_hand(kind: str) -> list[nn.Parameter]:
    """Sharded parameters, or whole ones on every rank."""
    whole = given_gradients(99)
    if kind == "whole":
        return [nn.Parameter(w.clone()) for w in whole]
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return [nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in whole]


def set_gradients(params: list[Any], step: int) -> None:
    for p, g in zip(params, given_gradients(step), strict=True):
        is_sharded = isinstance(p, DTensor)
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if is_sharded else g


#: how parameters are laid out, and what updates them
MISSING: dict[str, Callable[..., Any]] = {
    "sharded": methods.if_shampoo,
    "whole": methods.if_shampoo,
    "sharded, by elements": methods.rms_prop,
}


def missing_gradients() -> dict[str, Any]:
    """On one rank and on all; rank 1 has rows 10 to 20 of the first parameter."""
    found = {}
    for kind, make in MISSING.items():
        params = by_hand(kind)
        placement = {"placement": rootfree.Sharded()} if kind == "whole" else {}
        optimizer = make(params, **placement)
        for step in range(3):
            set_gradients(params, step)
            if step >= 1 and dist.get_rank() == 1:
                params[0].grad = None
            if step == 1:
                params[1].grad = None
            optimizer.step()
        for p in params:
            p.grad = None
        optimizer.step()  # nobody has any
        found[kind] = [full(p) for p in params], step_counts(optimizer)
    return found


def step_counts(optimizer: Any) -> list[int]:
    return [int(row["step"]) for row in optimizer.state.values() if "step" in row]


def missing_alone(kind: str) -> tuple[list[torch.Tensor], list[int]]:
    params = by_hand("whole")
    optimizer = MISSING[kind](params)
    for step in range(3):
        set_gradients(params, step)
        if step >= 1 and kind != "whole":
            params[0].grad[10:20] = 0.0
        if step == 1:
            params[1].grad = None
        optimizer.step()
    return [full(p) for p in params], step_counts(optimizer)


NOT_FINITE: dict[str, tuple[str, Callable[..., Any]]] = {
    "IFShampoo": ("sharded", methods.if_shampoo),
    "IFShampoo, whole": ("whole", partial(methods.if_shampoo, placement=rootfree.Sharded())),
    "RFRMSprop": ("sharded", methods.rms_prop),
}


def not_finite() -> dict[str, tuple[bool, int]]:
    """One number on one rank is not finite: whether anything changed, steps left out.

    Another rank has no gradients at all: it has to hear of it nevertheless.
    """
    found = {}
    for name, (kind, make) in NOT_FINITE.items():
        params = by_hand(kind)
        optimizer = make(params)
        set_gradients(params, 0)
        optimizer.step()
        before = [full(p) for p in params], rootfree.full_state_dict(optimizer)["state"]
        set_gradients(params, 1)
        if dist.get_rank() == 1:
            local(params[1].grad)[0, 0] = torch.nan
        for p in params if dist.get_rank() == 3 else ():
            p.grad = None
        optimizer.step()
        after = [full(p) for p in params], rootfree.full_state_dict(optimizer)["state"]
        same = all(map(torch.equal, before[0], after[0])) and all(
            torch.equal(tensor, after[1][n][key])
            for n, row in before[1].items()
            for key, tensor in row.items()
        )
        found[name] = same, optimizer.skipped_steps
    return found
