"""Fifty steps of every method under every kind of parallelism, on 1, 2 and 4 ranks.

The whole grid writes the table of docs/distributed.md:

    PYTHONPATH=tests python tests/distributed/grid.py docs/distributed/grid.md

`test_grid.py` runs a part of it. The model has four parts that share nothing, so that one run tells
about shards of equal size, of unequal size, empty ones, and about convolutions.
"""

from __future__ import annotations

import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rootfree
from distributed.models import BATCH, data_ranks, weights
from distributed.same_result import expected_bytes, no_gathering, placed
from rootfree.placement.local import local

STEPS = 50
FEW = 10  # of most cases that the tests run
WORLDS = (1, 2, 4)
KINDS = ("even", "odd", "empty", "conv")
MODES = ("ddp", "ddp sharded", "fsdp2", "hsdp", "tp", "fsdp2+tp")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


class Case(NamedTuple):
    """One run."""

    world: int
    method: str
    mode: str
    dtype: str
    steps: int = STEPS


class Run(NamedTuple):
    """What a rank had in the end."""

    weights: dict[str, Tensor]
    bytes_right: bool  # whether it sent what it must, counted element by element
    sent: int  # bytes in a step
    state: int  # bytes of factors and momentum


class Deviation(NamedTuple):
    """How far the ranks' weights are from those of one process, and whether they sent the same."""

    largest: dict[str, float]  # by kind
    bytes_right: bool


class Parts(nn.Module):
    """Four small networks, each with its own rows of the input and of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.odd = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5))
        self.empty = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2))
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 2), nn.Tanh(), nn.Conv2d(6, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :9].view(-1, 1, 3, 3)
        parts = [self.even(x[:, :8]), self.odd(x[:, :9]), self.empty(x[:, :6]), self.conv(image)]
        return torch.cat([part.flatten(1) for part in parts], dim=1)


def model_of(dtype: str) -> Parts:
    torch.manual_seed(0)
    return Parts().to(DTYPES[dtype])


def _blocks(method: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda model, **given: method(model.parameters(), block_size=8, **options, **given)


def _elements(method: Callable[..., Any]) -> Callable[..., Any]:
    """Element by element: they have no placement."""
    return lambda model, **_: method(model.parameters(), lr=0.05, batch_size=BATCH)


METHODS: dict[str, Callable[..., Any]] = {
    "IFShampoo": _blocks(rootfree.IFShampoo, lr=0.05, batch_size=BATCH, weight_decay=0.1),
    "RFShampoo": _blocks(rootfree.RFShampoo, lr=0.05, batch_size=BATCH),
    "IFWhitening": _blocks(rootfree.IFWhitening, lr=1e-2, weight_decay=0.1),
    "IFFullAdagrad": _blocks(rootfree.IFFullAdagrad, lr=0.05, batch_size=BATCH),
    "RFFullAdagrad": _blocks(rootfree.RFFullAdagrad, lr=0.05, batch_size=BATCH, damping=1e-3),
    "IFWhitening with AdamW": lambda model, **given: rootfree.IFWhitening(
        rootfree.parameter_groups(model, weight_decay=0.1), lr=1e-2, block_size=8, **given
    ),
    "RFRMSprop": _elements(rootfree.RFRMSprop),
    "RFAdagrad": _elements(rootfree.RFAdagrad),
    "RFAdamW": _elements(rootfree.RFAdamW),
}


def wrapped(model: Parts, mode: str) -> nn.Module:
    world = dist.get_world_size()
    two = min(2, world)
    if mode in ("ddp", "ddp sharded"):
        return DistributedDataParallel(model)
    if mode == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if mode == "hsdp":
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (two, world // two), mesh_dim_names=names)
        return fully_shard(model, mesh=mesh)
    if mode == "tp":
        return split(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    mesh = init_device_mesh("cpu", (world // two, two), mesh_dim_names=("dp", "tp"))
    return fully_shard(split(model, mesh["tp"]), mesh=mesh["dp"])


def split(model: Parts, mesh: Any) -> Parts:
    """The columns of the first layer, the rows of the second; convolutions stay whole."""
    for part in (model.even, model.odd, model.empty):
        # DTensors between the layers: plain tensors would not tell how uneven parts are cut.
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        parallelize_module(part, mesh, plan)
    return model


def train(
    model: nn.Module, optimizer: Any, dtype: str, steps: int, part: tuple[int, int] = (0, 1)
) -> None:
    generator = torch.Generator().manual_seed(1)
    number, count = part
    rows = slice(number * BATCH // count, (number + 1) * BATCH // count)
    for _ in range(steps):
        x = torch.randn(BATCH, 9, generator=generator, dtype=torch.float64)
        y = torch.randn(BATCH, 18, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        z = model(x[rows].to(DTYPES[dtype]))
        # Every part has its own loss: its gradients do not depend on the others.
        (z - y[rows].to(DTYPES[dtype])).square().mean(0).sum().backward()
        optimizer.step()


@cache
def alone(method: str, dtype: str, steps: int) -> dict[str, Tensor]:
    """What one process gets."""
    model = model_of(dtype)
    train(model, METHODS[method](model), dtype, steps)
    return weights(model)


def by_kind(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference in each part of the model."""
    far = {name: (mine[name] - theirs[name]).abs().max().item() for name in theirs}
    return {kind: max(v for name, v in far.items() if name.startswith(kind)) for kind in KINDS}


def trained(case: Case) -> Run:
    """On one rank; parameters must not be gathered."""
    model = wrapped(model_of(case.dtype), case.mode)
    optimizer = METHODS[case.method](model, **placed(case.mode))
    with patch.object(DTensor, "full_tensor", no_gathering):
        train(model, optimizer, case.dtype, case.steps, data_ranks(case.mode))
    sent: dict[str, int] = {}
    for ranks in optimizer._placing.agreement.crews:  # methods by elements have none
        sent |= ranks.traffic.sent
    wanted = expected_bytes(optimizer) if optimizer._placing.agreement.crews else {}
    right = all(sent.get(what, 0) == case.steps * n for what, n in wanted.items())
    state = sum(local(t).nbytes for row in optimizer.state.values() for t in floats(row))
    travelled = sum(sent.get(what, 0) for what in wanted)
    return Run(weights(model), right, travelled // case.steps, state)


def floats(row: dict[str, Tensor]) -> list[Tensor]:
    return [t for t in row.values() if t.is_floating_point()]


def run(turn: int, folder: Path) -> dict[Case, Run | None]:
    """What `launch.py` calls on every rank: all cases of this world; None: it failed."""
    found: dict[Case, Run | None] = {}
    for case in (case for case in everything() if case.world == dist.get_world_size()):
        try:
            found[case] = trained(case)
        except Exception:  # the others are still to be run
            traceback.print_exc()
            found[case] = None
    return found


def deviation(case: Case, ranks: Sequence[Run | None]) -> Deviation:
    """The worst over the ranks."""
    expected = alone(case.method, case.dtype, case.steps)
    there = [each for each in ranks if each is not None]
    if len(there) < len(ranks):
        return Deviation(dict.fromkeys(KINDS, math.inf), False)
    far = [by_kind(each.weights, expected) for each in there]
    largest = {kind: max(each[kind] for each in far) for kind in KINDS}
    return Deviation(largest, all(each.bytes_right for each in there))


def round_off(method: str, steps: int) -> float:
    """How far one process in float32 is from itself in float64: what rounding does here."""
    singles, doubles = alone(method, "fp32", steps), alone(method, "fp64", steps)
    pairs = zip(singles.values(), doubles.values(), strict=True)
    return max((a.double() - b).abs().max().item() for a, b in pairs)


def everything() -> list[Case]:
    return [
        Case(world, method, mode, dtype)
        for world in WORLDS
        for method in METHODS
        for mode in MODES
        for dtype in DTYPES
    ]


#: what the tests run: each mode, each method, and each world at least once; the headline to the end
TOLD = [
    *[Case(world, "IFShampoo", "fsdp2", "fp64") for world in (4, 2)],
    *[Case(4, "IFShampoo", mode, "fp64", FEW) for mode in ("ddp sharded", "fsdp2+tp")],
    Case(4, "RFFullAdagrad", "hsdp", "fp64", FEW),
    Case(4, "IFWhitening with AdamW", "tp", "fp32", FEW),
    Case(4, "RFAdamW", "fsdp2+tp", "fp64"),
    Case(2, "RFShampoo", "hsdp", "fp32", FEW),
    Case(2, "IFFullAdagrad", "fsdp2+tp", "fp64", FEW),
    Case(2, "RFRMSprop", "tp", "fp64", FEW),
    Case(1, "IFWhitening", "fsdp2+tp", "fp64", FEW),
    Case(1, "RFAdagrad", "ddp", "fp32", FEW),
]


def told() -> dict[str, dict[Case, Run]]:
    """Those of this world."""
    mine = [case for case in TOLD if case.world == dist.get_world_size()]
    return {"grid": {case: trained(case) for case in mine}}


def tables(found: dict[Case, Deviation]) -> str:
    """The largest deviations by method and mode, and by kind of shard and mode."""
    lines = []
    for dtype in DTYPES:
        mine = {case: each for case, each in found.items() if case.dtype == dtype}
        lines += [f"| {dtype} |" + "".join(f" {mode} |" for mode in MODES)]
        lines += ["|---" * (len(MODES) + 1) + "|"]
        for method in METHODS:
            cells = [
                max(max(d.largest.values()) for c, d in mine.items() if c[1:3] == (method, mode))
                for mode in MODES
            ]
            lines.append(f"| {method} |" + "".join(f" {cell:.0e} |" for cell in cells))
        for kind in KINDS:
            cells = [max(d.largest[kind] for c, d in mine.items() if c.mode == m) for m in MODES]
            lines.append(f"| *{kind}* |" + "".join(f" {cell:.0e} |" for cell in cells))
        lines.append("")
    right = sum(each.bytes_right for each in found.values())
    lines.append(f"{len(found)} runs of {STEPS} steps; bytes as predicted in {right} of them.")
    return "\n".join(lines) + "\n"


def main(path: Path) -> None:
    from distributed import launch

    with tempfile.TemporaryDirectory() as there:
        worlds = launch.results("distributed.grid", WORLDS, Path(there) / "ranks", limit=7200)
    found = {
        case: deviation(case, [rank[case] for rank in worlds[WORLDS.index(case.world)]])
        for case in everything()
    }
    text = tables(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    from distributed import grid  # ranks know the classes by this name

    grid.main(Path(sys.argv[1]))
