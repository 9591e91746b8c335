"""Blocks in many small rounds, and a vocabulary that ranks share; see test_travelling.py."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rootfree
from distributed import methods
from distributed.models import MODES, data_ranks, network, train, weights
from distributed.same_result import no_gathering, placed
from rootfree.placement import exchange, gathering

STEPS = range(3)
#: a block of 16×16 numbers in float64: rounds of about one block
SMALL = 16 * 16 * 8
VOCABULARY = {"structure": ("diagonal", "dense"), "block_size": 8}


def run() -> dict[str, Any]:
    found: dict[str, Any] = {}
    if dist.get_world_size() == 4:
        return gathered()
    for mode in ("fsdp2", "ddp sharded"):
        found[f"rounds, {mode}"] = {
            "one": in_rounds(mode, 2**20), "many": in_rounds(mode, SMALL),
            "waiting": in_rounds(mode, SMALL, at_once=True),
        }  # fmt: skip
    for kind in ("sharded", "whole"):
        found[f"vocabulary, {kind}"] = vocabulary(kind)
    return {"travelling": found}


def gathered() -> dict[str, Any]:
    """Whole tensors without torch's gathering: shards of shards, copies, rows that are nowhere."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    numbers = torch.arange(35.0).view(5, 7)
    found = []
    with patch.object(gathering, "gathers", lambda _: False):
        for placements in (
            (Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(0)),
            (Shard(1), Replicate()), (Replicate(), Replicate()),
        ):  # fmt: skip
            shards = distribute_tensor(numbers, mesh, placements)
            with patch.object(DTensor, "full_tensor", no_gathering):
                found.append(gathering.whole_tensor(shards))
        model = MODES["fsdp2"](network())
        optimizer = methods.if_shampoo(model.parameters())
        train(model, optimizer, STEPS, part=data_ranks("fsdp2"))
        with patch.object(DTensor, "full_tensor", no_gathering):
            by_hand = rootfree.full_state_dict(optimizer)["state"]
    return {"gathered": (numbers, found, by_hand, rootfree.full_state_dict(optimizer)["state"])}


def in_rounds(mode: str, size: int, *, at_once: bool = False) -> dict[str, Any]:
    """Weights after a few steps, and in which order exchanges were begun and waited for."""
    model = MODES[mode](network())
    optimizer = methods.if_shampoo(model.parameters(), **placed(mode))
    log: list[tuple[str, int]] = []
    start = exchange._all_to_all

    def logged(come: Tensor, out: Tensor, sizes: Any, group: Any) -> Any:
        number = sum(what == "begun" for what, _ in log)
        log.append(("begun", number))
        finish = start(come, out, sizes, group)
        if at_once:
            done = finish()
            finish = lambda: done  # noqa: E731

        def wait() -> Tensor:
            log.append(("landed", number))
            return finish()

        return wait

    with (
        patch.object(exchange, "_all_to_all", logged),
        patch("rootfree.placement.rounds.ROUND_BYTES", size),
    ):
        train(model, optimizer, STEPS, part=data_ranks(mode))
    (ranks,) = optimizer._placing.agreement.crews
    return {
        "weights": weights(model), "log": log, "rounds": ranks.traffic.rounds,
        "summary": optimizer.summary(), "traffic": ranks.traffic,
    }  # fmt: skip


def vocabulary(kind: str) -> tuple[Tensor, list[int], dict[str, int]]:
    """An embedding of 50 words, in `whole` and `sharded` with its blocks on all ranks; their owners
    in order, and what a step moves and a rank keeps."""
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randn(4, 50, 6, generator=generator, dtype=torch.float64)
    given: dict[str, Any] = {}
    if kind == "sharded":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        p: Any = nn.Parameter(distribute_tensor(numbers[0], mesh, [Shard(0)]))
    else:
        p = nn.Parameter(numbers[0].clone())
        given = {} if kind == "alone" else {"placement": rootfree.Sharded()}
    optimizer = methods.if_shampoo([p], **VOCABULARY, **given)
    for g in numbers[1:]:
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if kind == "sharded" else g
        optimizer.step()
    home = optimizer._placing.homes.get(p)
    owners = [] if home is None else [owner for tile in home.owners for owner in tile]
    counts = {} if home is None else counted(optimizer, p)
    return (p.full_tensor() if kind == "sharded" else p).detach().clone(), owners, counts


def counted(optimizer: Any, p: Tensor) -> dict[str, int]:
    """Bytes that this rank sends and receives in a step, and those of its factors and momentum."""
    (ranks,) = optimizer._placing.agreement.crews
    found = {
        way: sum(n for what, n in getattr(ranks.traffic, way).items() if what != "sums") // 3
        for way in ("sent", "received")
    }
    sizes = {key: local_size(t) for key, t in optimizer.state[p].items() if t.is_floating_point()}
    found["momentum_bytes"] = sizes.pop("momentum")
    return {**found, "factor_bytes": sum(n for key, n in sizes.items() if ".factor" in key)}


def local_size(t: Any) -> int:
    here = t.to_local() if isinstance(t, DTensor) else t
    return int(here.numel() * here.element_size())
