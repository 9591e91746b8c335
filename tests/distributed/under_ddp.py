"""Ranks under DDP that were told different things, without `placement`; see test_agreement.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import rootfree
from distributed.found_alone import held, stepped_alone, unchanged
from distributed.methods import if_shampoo, rms_prop
from distributed.models import ddp, network, train, weights
from distributed.one_rank import called
from rootfree.placement import data_parallel, meeting
from rootfree.placement.ranks import PlacementError

IMPATIENT = 0.5  # seconds


def copies() -> nn.Module:
    """A network on every rank that has the averaged gradients."""
    return ddp(network())


def trained(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    with unchanged(optimizer):
        train(model, optimizer, range(steps), part=(dist.get_rank(), dist.get_world_size()))


def placement_on_some(rank: int) -> None:
    """The others are waiting in their backward pass when those who have it give up."""
    model = copies()
    with patch.object(meeting, "PATIENCE", IMPATIENT), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = if_shampoo(
            rootfree.parameter_groups(model),
            placement=rootfree.Sharded() if rank in (1, 2) else None,
        )
    with pytest.raises(PlacementError) as found:
        trained(model, optimizer)
    try:  # without it on all of them
        trained(model, if_shampoo(rootfree.parameter_groups(model)))
    except PlacementError as error:
        raise AssertionError("the error does not go away") from error
    raise found.value


def other_rate(rank: int) -> None:
    """The same error again, until the rates are the same."""
    model = copies()
    optimizer = rms_prop(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + (rank == 2))
    with pytest.raises(PlacementError, match="lr of parameter group 0"):
        trained(model, optimizer)
    try:
        with unchanged(optimizer):
            optimizer.step()
    finally:
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()


def other_rate_of_halves(rank: int) -> None:
    """Those who share blocks are of one mind; the others have copies too."""
    model = copies()
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "within"))
    optimizer = if_shampoo(model.parameters(), placement=rootfree.Sharded(mesh=halves["within"]))
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + (rank >= 2))
    trained(model, optimizer)


def outside_the_mesh(rank: int) -> None:
    """Those that are in it share with each other, and wait in the backward pass."""
    model, mesh = copies(), DeviceMesh("cpu", [0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = if_shampoo(model.parameters(), placement=rootfree.Sharded(mesh=mesh))
    trained(model, optimizer)


def other_parameters(rank: int) -> None:
    model = copies()
    params = list(model.parameters())
    trained(model, if_shampoo(params[:-1] if rank == 3 else params))


def other_count(rank: int) -> None:
    """A rank that did not load its checkpoint, say."""
    model = copies()
    optimizer = if_shampoo(model.parameters())
    for p in model.parameters() if rank == 1 else ():
        optimizer.state[p]["step"] += 7
    trained(model, optimizer)


def counted_on_one(rank: int) -> None:
    model = copies()
    optimizer = if_shampoo(model.parameters())
    if rank == 1:
        rootfree.track_batch_size(model, optimizer, count="examples")
    trained(model, optimizer)


def bad_gradient(rank: int) -> None:
    model = copies()
    optimizer = if_shampoo(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        if rank == 2:
            p.grad = p.grad.to_sparse()
    with unchanged(optimizer):
        optimizer.step()


def late(rank: int) -> None:
    """Nobody waits for ever for a rank that is late; what it was told is compared nevertheless."""
    model = copies()
    optimizer = rms_prop(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + (rank == 0))
    before = held(optimizer)
    if rank > 0:
        with patch.object(meeting, "PATIENCE", IMPATIENT), pytest.warns(match="others did not"):
            stepped_alone(optimizer)
        assert not torch.equal(before[0, "p"], held(optimizer)[0, "p"])  # it went on
    dist.barrier()
    try:
        if rank == 0:
            stepped_alone(optimizer)
    finally:
        dist.barrier()
    stepped_alone(optimizer)


def added_later(rank: int) -> str:
    """By one rank, which cannot tell at once that the others are not merely late."""
    model = copies()
    *params, last = model.parameters()
    optimizer = rms_prop(params)
    stepped_alone(optimizer)
    if rank == 1:
        optimizer.add_param_group({"params": [last]})
        with patch.object(meeting, "PATIENCE", IMPATIENT), pytest.warns(match="others did not"):
            stepped_alone(optimizer)
    try:
        stepped_alone(optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


def counted_later(rank: int) -> str:
    """After the first step nobody looks; a rank that counts alone says so instead of waiting."""
    optimizer = rms_prop(network().parameters())
    stepped_alone(optimizer)
    model = network()
    if rank == 1:
        rootfree.track_batch_size(model, optimizer, process_group=dist.group.WORLD)
    with patch.object(meeting, "PATIENCE", IMPATIENT):
        try:
            stepped_alone(optimizer)
        except RuntimeError as error:
            return str(error)
    return ""


#: optimizers that see nothing of each other: one on every rank, or each with some parameters
RIGHT: dict[str, Callable[..., Any]] = {
    "copies": if_shampoo,
    "divided": lambda params: ZeroRedundancyOptimizer(params, optimizer_class=if_shampoo),
}


def undisturbed(rank: int) -> dict[str, Any]:
    """What comes of right programs, and how much Python a later step calls.

    Such a step has no collective, and looks at nothing.
    """
    own = rms_prop(network().parameters())  # ranks that have nothing in common
    own.param_groups[0]["lr"] = 0.1 * (1 + rank)
    stepped_alone(own)
    found, part = {}, (rank, dist.get_world_size())
    for kind, make in RIGHT.items():
        model = copies()
        optimizer = make(model.parameters())
        train(model, optimizer, range(1), part=part)
        with (
            patch.object(data_parallel, "_wrapped", side_effect=AssertionError),
            patch.object(meeting, "_store", side_effect=AssertionError),
            patch.object(dist, "all_reduce", side_effect=AssertionError),
        ):
            train(model, optimizer, range(1, 3), part=part)
        found[kind] = weights(model), called(optimizer.step)
    return found


def alone() -> tuple[dict[str, torch.Tensor], int]:
    """The same in one process."""
    model = network()
    optimizer = if_shampoo(model.parameters())
    train(model, optimizer, range(3))
    return weights(model), called(optimizer.step)


#: what each rank does, and what is said on all of them
CASES: dict[str, tuple[Callable[[int], Any], str]] = {
    "DDP: placement": (placement_on_some, "waits to share its parameters, rank "),
    "DDP: other rate": (other_rate, "step(): lr of parameter group 0 must be the same on all rank"),
    "DDP: other rate of halves": (other_rate_of_halves, "step(): lr of parameter group 0 must be "),
    "DDP: outside the mesh": (outside_the_mesh, "must contain every rank that has the parameters"),
    "DDP: other parameters": (other_parameters, "step(): parameter unused.bias must be the same"),
    "DDP: other count": (other_count, "step of parameter group 0 must be the same on all ranks, g"),
    "DDP: counted on one": (counted_on_one, "whether track_batch_size counts must be the same on "),
    "DDP: bad gradient": (bad_gradient, "is sparse_coo; only dense real gradients"),
    "DDP: late": (late, "step(): lr of parameter group 0 must be the same on all ranks, got "),
}  # fmt: skip
