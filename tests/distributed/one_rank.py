"""A rank without others takes the steps of plain tensors; see test_one_rank.py."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import rootfree
from distributed import methods
from distributed.models import MODES, network, train, weights

KINDS = ("plain", "fsdp2", "sharded")


def run() -> dict[str, Any]:
    made = {"IFShampoo": methods.if_shampoo, "IFWhitening": methods.whitening}
    found = {name: {kind: steps(make, kind) for kind in KINDS} for name, make in made.items()}
    found["RFRMSprop"] = {kind: steps(methods.rms_prop, kind) for kind in KINDS[:2]}
    if find_spec("triton") is not None:
        found["kernels"] = {kind: by_kernels(kind) for kind in KINDS[:2]}
    return {"one rank": found}


def steps(make: Callable[..., Any], kind: str) -> dict[str, Any]:
    """Weights, and what one more step calls: functions of Python, operations of torch."""
    model: nn.Module = network(torch.float32)
    if kind == "fsdp2":
        model = MODES["fsdp2"](model)
    given = {"placement": rootfree.Sharded()} if kind == "sharded" else {}
    optimizer = make(model.parameters(), **given)
    train(model, optimizer, range(4))
    calls = called(optimizer.step)
    with Operations() as operations:
        optimizer.step()
    return {**result(model, optimizer), "calls": calls, "operations": operations.seen}


def by_kernels(kind: str) -> dict[str, Any]:
    """The same of one small matrix, in Triton's interpreter; programs are not counted."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(16, 8, bias=False)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    options = {"matmul_dtype": methods.BF16, "fused": True, "batch_size": 4}
    optimizer = rootfree.IFShampoo(model.parameters(), lr=1e-2, **options)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((4, 16), 1.0 + step)).square().mean().backward()
        optimizer.step()
    return result(model, optimizer)


def result(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights, which stacks there were, and which entries of a checkpoint are DTensors."""
    saved = optimizer.state_dict()["state"]
    entries = {f"{n}.{key}": isinstance(t, DTensor) for n in saved for key, t in saved[n].items()}
    return {"weights": weights(model), "stacks": stacks_of(optimizer), "saved": entries}


def stacks_of(optimizer: Any) -> list[str]:
    works = [work for memory in optimizer._memories.values() for _, work in memory.patterns]
    return [type(stack).__name__ for work in works for w in work for _, stack in w.stacks or []]


def called(work: Callable[[], Any]) -> int:
    count = 0

    def look(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class Operations(TorchDispatchMode):
    """Counts what is dispatched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))
