"""Recorders on ranks with batches of unequal size, one of them empty; see test_recording.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rootfree
from distributed.models import MODES, weights, whole
from distributed.same_result import no_gathering, placed
from rootfree.recorders.losses import LOSSES

STEPS = 3
CLASSES = 3
#: rows that each of four ranks sees
UNEQUAL = (1, 3, 0, 4)
BATCH = sum(UNEQUAL)


class Network(nn.Module):
    """Layers that hooks know, one that torch.func treats, fewer rows than ranks, odd sizes."""

    elsewhere = False  # whether a weight is also used by a function

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.wide = nn.Linear(24, 21)
        self.norm = nn.LayerNorm(21)
        self.twice = nn.Linear(21, 21, bias=False)
        self.odd = nn.Linear(21, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        x = self.twice(torch.tanh(self.norm(self.wide(x))))
        if self.elsewhere:  # a hook sees half of what the weight does
            x = x + nn.functional.linear(torch.tanh(x), self.twice.weight)
        return self.odd(torch.tanh(x))


def network(elsewhere: bool = False) -> Network:
    torch.manual_seed(0)
    model = Network().double()
    model.elsewhere = elsewhere
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(500 + step)
    x = torch.randn(BATCH, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def by_outputs(z: Tensor, generator: Any) -> Tensor:
    """Gradients that look drawn, but belong to their example wherever that is."""
    return (1000 * z).cos()


RECORDERS: dict[str, Callable[[nn.Module], Any]] = {
    "KFAC": lambda m: rootfree.KFACRecorder(m, joint=False, loss="cross_entropy"),
    "KFAC, reduce": lambda m: rootfree.KFACRecorder(m, joint=False, sharing="reduce"),
    "KFAC, type-2": lambda m: rootfree.KFACRecorder(
        m, joint=False, fisher="type-2", loss="cross_entropy"
    ),
    "per example": lambda m: rootfree.PerExampleFisherRecorder(m, loss="cross_entropy"),
    "sampled": lambda m: rootfree.MonteCarloFisherRecorder(m, loss="cross_entropy", samples=2),
}
METHODS: dict[str, Callable[..., Any]] = {
    "IFShampoo": lambda params, **given: rootfree.IFShampoo(
        params, lr=1e-2, batch_size=BATCH, block_size=16, max_update_rms=None, **given
    ),
    "RFFullAdagrad": lambda params, **given: rootfree.RFFullAdagrad(
        params, lr=1e-2, batch_size=BATCH, block_size=32, damping=1e-2, **given
    ),
    "RFRMSprop": lambda params, **given: rootfree.RFRMSprop(
        params, lr=1e-3, batch_size=BATCH, damping=1e-3, max_update=None, **given
    ),
}
#: method, recorder, mode; every recorder under FSDP2, and what differs elsewhere
CASES = [
    *[("IFShampoo", recorder, "fsdp2") for recorder in RECORDERS],
    *[("IFShampoo", "KFAC", mode) for mode in ("ddp", "ddp sharded", "hsdp")],
    *[("IFShampoo", "per example", "ddp sharded"), ("RFFullAdagrad", "per example", "hsdp")],
    *[("RFRMSprop", recorder, "fsdp2") for recorder in ("KFAC", "per example")],
]


def trained(method: str, recorder: str, mode: str) -> dict[str, Tensor]:
    """The weights after a few steps whose loss is the average over the whole batch."""
    inner = network()
    model = (whole if mode == "alone" else MODES[mode])(inner)
    record = RECORDERS[recorder](inner)
    optimizer = METHODS[method](inner.parameters(), curvature=record, **placed(mode))
    world = 1 if mode == "alone" else dist.get_world_size()
    train(model, record, optimizer, mode, weight=world / BATCH)
    return weights(inner)


def train(model: nn.Module, record: Any, optimizer: Any, mode: str, *, weight: float) -> None:
    """`weight`: of each term in the loss."""
    rank = 0 if mode == "alone" else dist.get_rank()
    first = sum(UNEQUAL[:rank])
    rows = slice(None) if mode == "alone" else slice(first, first + UNEQUAL[rank])
    drawn = patch.object(type(LOSSES["cross_entropy"]), "sample", staticmethod(by_outputs))
    for step in range(STEPS):
        x, y = batch(step)
        with torch.no_grad():  # FSDP2 leaves the parameters of the root unsharded after it
            model(x[rows])
        optimizer.zero_grad()
        with record, drawn:
            z = model(x[rows])
            loss = weight * nn.functional.cross_entropy(z, y[rows], reduction="sum")
            record.backward(loss, z)
        with patch.object(DTensor, "full_tensor", no_gathering):
            optimizer.step()


def summed(mode: str) -> dict[str, Tensor]:
    """FSDP2 that adds up gradients: the loss is divided by the terms of all ranks already."""
    inner = network()
    model = (whole if mode == "alone" else MODES[mode])(inner)
    if mode != "alone":
        for module in (model, *model.children()):
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
    record = RECORDERS["KFAC"](inner)
    optimizer = METHODS["IFShampoo"](inner.parameters(), curvature=record)
    train(model, record, optimizer, mode, weight=1 / BATCH)
    return weights(inner)


def used_elsewhere(mode: str) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """A weight that hooks see half of; which recorder says that it is left out."""
    left_out = {}
    for recorder in ("per example", "KFAC"):
        inner = network(elsewhere=True)
        model = (whole if mode == "alone" else MODES[mode])(inner)
        record = RECORDERS[recorder](inner)
        optimizer = METHODS["IFShampoo"](inner.parameters(), curvature=record)
        world = 1 if mode == "alone" else dist.get_world_size()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, record, optimizer, mode, weight=world / BATCH)
        lines = record.summary().splitlines()
        left_out[recorder] = any("twice" in x and "gradient outer" in x for x in lines)
    return weights(inner), left_out


def run() -> dict[str, Any]:
    found: dict[Any, Any] = {case: trained(*case) for case in CASES}
    found["summed"] = summed("fsdp2")
    found["used elsewhere"] = used_elsewhere("fsdp2")
    return {"recorders": found}
