"""What one rank finds by itself, or is told alone: the others hear of it; see test_agreement.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rootfree
from distributed.by_hand import by_hand, set_gradients
from distributed.methods import if_shampoo, rms_prop
from distributed.models import MODES, data_ranks, network, train
from rootfree.placement import meeting
from rootfree.placement.local import local
from rootfree.shell.said import description_of


@contextmanager
def unchanged(optimizer: Any) -> Iterator[None]:
    """An error inside must leave everything as it was."""
    before = held(optimizer)
    try:
        yield
    except Exception as error:
        after = held(optimizer)
        alike = before.keys() == after.keys()
        if not alike or not all(torch.equal(before[key], after[key]) for key in before):
            raise AssertionError("something was changed") from error
        raise


def held(optimizer: Any) -> dict[Any, torch.Tensor]:
    """What this rank has of parameters and state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    rows = {(n, key): t for n, p in enumerate(params) for key, t in optimizer.state[p].items()}
    rows |= {(n, "p"): p.detach() for n, p in enumerate(params)}
    return {key: local(t).clone() for key, t in rows.items()}


def whole(**given: Any) -> Any:
    return if_shampoo(by_hand("whole"), **{"placement": rootfree.Sharded(), **given})


def stepped(optimizer: Any) -> list[Any]:
    """The parameters after a step, with gradients for another."""
    params = optimizer.param_groups[0]["params"]
    set_gradients(params, 0)
    optimizer.step()
    set_gradients(params, 1)
    return params


def sparse_gradient(rank: int) -> None:
    """In the group of a companion, whose updates no rank shares."""
    extra = nn.Parameter(torch.ones(4, 3))
    optimizer = whole()
    optimizer.add_param_group({"params": [extra], "companion": "adamw"})
    stepped(optimizer)
    extra.grad = torch.ones(4, 3) if rank != 1 else torch.ones(4, 3).to_sparse()
    with unchanged(optimizer):
        optimizer.step()


def plain_gradient(rank: int) -> None:
    optimizer = if_shampoo(by_hand("sharded"))
    params = stepped(optimizer)
    if rank == 2:
        params[0].grad = torch.ones(40, 24)
    with unchanged(optimizer):
        optimizer.step()


def replaced_state(rank: int) -> None:
    optimizer = whole()
    params = stepped(optimizer)
    if rank == 3:
        optimizer.state[params[1]]["momentum"] = torch.zeros(3, 3)
    with unchanged(optimizer):
        optimizer.step()


def bad_argument(rank: int) -> None:
    """Found before there is any group."""
    whole(nonfinite="leave" if rank == 1 else "skip")


def bad_placement(rank: int) -> None:
    whole(placement="all" if rank == 1 else rootfree.Sharded())


def no_parameters(rank: int) -> None:
    if_shampoo([] if rank == 0 else by_hand("whole"), placement=rootfree.Sharded())


def bad_companion(rank: int) -> None:
    optimizer = whole()
    rate = -1.0 if rank == 2 else 0.1
    extra = {"params": [nn.Parameter(torch.ones(3))], "companion": "adamw", "lr": rate}
    with unchanged(optimizer):
        optimizer.add_param_group(extra)


def bad_replicas(rank: int) -> None:
    """With whom to share is not known then; the others learn it from a note."""
    with patch.object(meeting, "PATIENCE", 0.5):
        whole(placement=rootfree.Sharded(replicas=3 if rank == 1 else None))


def placement_on_one(rank: int) -> None:
    """The ranks without it find out at their first step: under DDP that comes after the others'
    constructors, as their backward pass does."""
    params, more = [nn.Parameter(torch.ones(9, 7))], [nn.Parameter(torch.ones(2, 7))]
    groups = [{"params": params}, {"params": more}]
    optimizer = if_shampoo(groups, placement=rootfree.Sharded() if rank == 2 else None)
    key = meeting._waiting_key(description_of(params))
    dist.distributed_c10d._get_default_store().wait([key])
    stepped_alone(optimizer)


def stepped_alone(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def other_nonfinite(rank: int) -> None:
    whole(nonfinite="raise" if rank == 1 else "skip")


def other_method(rank: int) -> None:
    (if_shampoo if rank == 1 else rms_prop)(by_hand("sharded"))


def other_rate_by_elements(rank: int) -> None:
    optimizer = rms_prop(by_hand("sharded"))
    stepped(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + (rank == 2))
    with unchanged(optimizer):
        optimizer.step()


def other_rate_of_replicas(rank: int) -> None:
    """Ranks that exchange nothing must agree as well."""
    optimizer = whole(placement=rootfree.Sharded(replicas=2))
    stepped(optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1 * (1 + (rank >= 2)))
    with unchanged(optimizer):
        optimizer.step()


def counted_on_one(rank: int) -> None:
    model = MODES["fsdp2"](network())
    optimizer = if_shampoo(model.parameters())
    if rank == 1:
        rootfree.track_batch_size(model, optimizer)
    with unchanged(optimizer):
        train(model, optimizer, range(1), part=data_ranks("fsdp2"))


def missing_copy(rank: int) -> None:
    """Two ranks have the same rows; by elements, nobody sends them anything."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate(), Shard(0)]
    p = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, placements))
    optimizer = rms_prop([p])
    p.grad = distribute_tensor(torch.ones(6, 4), mesh, placements)
    if rank == 1:
        p.grad = None
    with unchanged(optimizer):
        optimizer.step()


def not_finite(rank: int) -> None:
    optimizer = if_shampoo(by_hand("sharded"), nonfinite="raise")
    params = stepped(optimizer)
    if rank == 3:
        local(params[0].grad)[0, 0] = torch.nan
    with unchanged(optimizer):
        optimizer.step()


def broken_part(rank: int, *, make: Callable[..., Any]) -> None:
    """The last number of a momentum, which one rank has, is not finite."""
    optimizer = make(by_hand("sharded"))
    stepped(optimizer)
    saved = rootfree.full_state_dict(optimizer)
    optimizer.step()
    saved["state"][0]["momentum"][-1, -1] = torch.inf
    with unchanged(optimizer):
        optimizer.load_state_dict(saved)


def broken_shard(rank: int) -> None:
    broken_part(rank, make=if_shampoo)


def broken_shard_by_elements(rank: int) -> None:
    broken_part(rank, make=rms_prop)


def other_steps(rank: int) -> None:
    """AdamW keeps its counts to itself: they are compared when they are loaded."""
    optimizer = whole()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "companion": "adamw"})
    saved = rootfree.full_state_dict(optimizer)
    saved["state"][3]["step"] += rank == 3
    with unchanged(optimizer):
        optimizer.load_state_dict(saved)


def no_checkpoint(rank: int) -> None:
    """One rank alone has read the file."""
    optimizer = whole()
    stepped(optimizer)
    saved = rootfree.full_state_dict(optimizer)
    optimizer.step()
    with unchanged(optimizer):
        optimizer.load_state_dict(saved if rank == 0 else None)


def no_false_alarms(rank: int) -> bool:
    """Optimizers that ranks have for themselves do not disturb those that they share."""
    for _ in range(2):
        alone, together = by_hand("whole"), by_hand("whole")
        own = if_shampoo(alone)  # on all ranks, but one of them is late
        time.sleep(0.2 * (rank == 1))
        stepped_alone(own)
        if rank == 1:
            if_shampoo(by_hand("whole")).summary()  # on one rank, which does not use it
        stepped_alone(if_shampoo(together, placement=rootfree.Sharded()))
    return True


#: what each rank does, and what is said on all of them
CASES: dict[str, tuple[Callable[[int], Any], str]] = {
    "sparse gradient": (sparse_gradient, "of shape (4, 3) is sparse_coo; only dense real gradient"),
    "plain gradient": (plain_gradient, "is a plain tensor, the parameter is a DTensor"),
    "replaced state": (replaced_state, "state 'momentum' of a parameter of shape (7, 5) has shape"),
    "bad argument": (bad_argument, "nonfinite must be one of 'skip', 'raise', 'propagate'; got 'l"),
    "bad placement": (bad_placement, "placement must be None or rootfree.Sharded(...), got 'all'"),
    "no parameters": (no_parameters, "optimizer got an empty parameter list"),
    "bad companion": (bad_companion, "lr must be in [0, inf), got -1.0"),
    "bad replicas": (bad_replicas, "replicas must divide the number of ranks, 4, got 3"),
    "placement on one": (placement_on_one, "placement: rank 2 (placement=Sharded(replicas=None)) "),
    "other nonfinite": (other_nonfinite, "nonfinite must be the same on all ranks, got 'skip' on "),
    "other method": (other_method, "method must be the same on all ranks, got 'RFRMSprop' on rank"),
    "other rate by elements": (other_rate_by_elements, "lr of parameter group 0 must be the same "),
    "other rate of replicas": (other_rate_of_replicas, "lr of parameter group 0 must be the same "),
    "counted on one": (counted_on_one, "whether track_batch_size counts must be the same on all r"),
    "missing copy": (missing_copy, "is missing on rank 1, but not on rank 0, and copies of the pa"),
    "not finite": (not_finite, "is not finite; nothing was changed"),
    "broken shard": (broken_shard, "'momentum' of a parameter of shape (40, 24) has numbers that "),
    "broken shard by elements": (broken_shard_by_elements, "'momentum' of a parameter of shape (4"),
    "other steps": (other_steps, "load_state_dict(): step must be the same on all ranks, got [0, "),
    "no checkpoint": (no_checkpoint, "state_dict must have the keys 'state' and 'param_groups', "),
}  # fmt: skip
