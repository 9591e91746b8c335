"""A rank without others takes the steps of plain tensors; see test_one_rank.py."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import rootfree
from distributed import methods
from distributed.models import MODES, network, train, weights

KINDS = ("plain", "fsdp2", "sharded")


def run() -> dict[str, Any]:
    made = {
        "IFShampoo": methods.if_shampoo,
        "IFWhitening": methods.whitening,
        "kernels": by_kernels,
    }
    if find_spec("triton") is None:
        del made["kernels"]
    found = {name: {kind: steps(make, kind) for kind in KINDS} for name, make in made.items()}
    found["RFRMSprop"] = {kind: steps(methods.rms_prop, kind) for kind in KINDS[:2]}
    return {"one rank": found}


def by_kernels(params: Any, **given: Any) -> rootfree.IFShampoo:
    options = {"matmul_dtype": methods.BF16, "fused": True, "block_size": 16, "batch_size": 8}
    return rootfree.IFShampoo(params, lr=1e-2, **options, **given)


def steps(make: Callable[..., Any], kind: str) -> dict[str, Any]:
    """Weights, and what one more step calls: functions of Python, operations of torch."""
    model: nn.Module = network(torch.float32)
    if kind == "fsdp2":
        model = MODES["fsdp2"](model)
    given = {"placement": rootfree.Sharded()} if kind == "sharded" else {}
    optimizer = make(model.parameters(), **given)
    train(model, optimizer, range(4))
    saved = optimizer.state_dict()["state"][2]
    calls = called(optimizer.step)
    with Operations() as operations:
        optimizer.step()
    return {
        "stacks": stacks_of(optimizer),
        "weights": weights(model), "calls": calls, "operations": operations.seen,
        "saved": {key: isinstance(t, DTensor) for key, t in saved.items()},
    }  # fmt: skip


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
