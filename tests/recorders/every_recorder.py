"""All recorders in one table, so that what holds for each is tested for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rootfree
from rootfree.recorders import (
    HutchinsonDiagonal,
    KFACRecorder,
    MonteCarloFisherRecorder,
    PerExampleFisherRecorder,
)

RECORDERS: dict[str, Callable[..., Any]] = {
    "kfac": lambda model, **kw: KFACRecorder(model, **kw),
    "kfac-reduce": lambda model, **kw: KFACRecorder(model, sharing="reduce", **kw),
    "kfac-type-2": lambda model, **kw: KFACRecorder(
        model, fisher="type-2", loss="cross_entropy", **kw
    ),
    "kfac-sampled": lambda model, **kw: KFACRecorder(
        model, fisher="monte-carlo", loss="cross_entropy", seed=0, **kw
    ),
    "per-example": lambda model, **kw: PerExampleFisherRecorder(model, **kw),
    "sampled": lambda model, **kw: MonteCarloFisherRecorder(
        model, loss="cross_entropy", seed=0, **kw
    ),
    "hutchinson": lambda model, **kw: HutchinsonDiagonal(model, seed=0, **kw),
}

DETERMINISTIC = ("kfac", "kfac-reduce", "kfac-type-2", "per-example")


def matrices(H: Any) -> list[Tensor]:
    """What identifies a curvature: its factors, Σ VᵀV, or its diagonal."""
    if isinstance(H, rootfree.KroneckerCurvature):
        return list(H.factors)
    if isinstance(H, rootfree.SumOfOuterProducts):
        V = H.V.flatten(1)
        return [V.mT @ V]
    return [] if H is None else [H.h]


def record(
    recorder: Any,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    *,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> None:
    """One context; the loss is the average over all batches."""
    total = sum(len(y) for _, y in batches)
    with recorder:
        for x, y in batches:
            z = model(x)
            loss = nn.functional.cross_entropy(z, y, reduction="sum") / total
            recorder.backward(scale(loss), z)


def curvatures(recorder: Any, model: nn.Module, *, batch_size: int) -> dict[str, list[Tensor]]:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    recorder.check(list(trained.values()))
    return {n: matrices(recorder.of(p, batch_size=batch_size)) for n, p in trained.items()}


def assert_equal(
    one: dict[str, list[Tensor]], other: dict[str, list[Tensor]], **tolerance: float
) -> None:
    assert one.keys() == other.keys()
    assert any(one.values())
    for name in one:
        for a, b in zip(one[name], other[name], strict=True):
            torch.testing.assert_close(
                a.double(), b.double(), msg=lambda m, n=name: f"{n}: {m}", **tolerance
            )
