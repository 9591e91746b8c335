"""Optimizer steps, timed side by side in one process and given as ratios.

Machines are shared and noisy: the optimizers take turns, and the median of each is compared, so
that a slow moment hits all of them. A turn is two steps, one of which refreshes the preconditioner
of methods that do so every second step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import nn

import rootfree
from rootfree_lab.shapes import SHAPE_SETS

Parameters = list[nn.Parameter]

REFERENCE = "torch RMSprop, foreach, momentum"
STEPS_PER_TURN = 2


def _published_if_shampoo(ps: Parameters) -> torch.optim.Optimizer | None:
    """The published implementation, if it is installed, in fp32 and with T = 2."""
    try:
        from sirfshampoo import SIRFShampoo
    except ModuleNotFoundError:
        return None
    optimizer: torch.optim.Optimizer = SIRFShampoo(
        nn.ParameterList(ps), params=ps, lr=1e-4, batch_size=128, T=2
    )
    return optimizer


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer | None]] = {
    REFERENCE: lambda ps: torch.optim.RMSprop(ps, lr=1e-4, momentum=0.9, foreach=True),
    "torch AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=True),
    "RFRMSprop": lambda ps: rootfree.RFRMSprop(ps, lr=1e-4, batch_size=128),
    "RFAdamW": lambda ps: rootfree.RFAdamW(ps, lr=1e-4, batch_size=128),
    "IFShampoo": lambda ps: rootfree.IFShampoo(ps, lr=1e-4, batch_size=128),
    "sirfshampoo": _published_if_shampoo,
}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_bench(shapes: str, names: list[str], *, turns: int) -> Table:
    """Median milliseconds a step, ratio to the first optimizer, state bytes a parameter."""
    _check("--shapes", [shapes], SHAPE_SETS)
    _check("--optimizer", names, OPTIMIZERS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    gradients = [1e-3 * torch.randn(shape, device=device) for shape in SHAPE_SETS[shapes]()]
    optimizers = {}
    for name in names:
        parameters = [nn.Parameter(torch.randn_like(g)) for g in gradients]
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        optimizer = OPTIMIZERS[name](parameters)
        if optimizer is not None:
            optimizers[name] = optimizer
    times = _take_turns(optimizers, turns)
    count = sum(g.numel() for g in gradients)
    table = Table(title=f"{shapes}, {count / 1e6:.1f} M parameters, {device}, {turns} turns")
    table.add_column("optimizer")
    for heading in ("ms a step", "ratio", "state bytes a parameter"):
        table.add_column(heading, justify="right")
    reference = next(iter(times.values()))
    for name, milliseconds in times.items():
        table.add_row(
            name,
            f"{milliseconds:.2f}",
            f"{milliseconds / reference:.2f}",
            f"{_state_bytes(optimizers[name]) / count:.1f}",
        )
    return table


def _check(option: str, values: list[str], allowed: dict[str, Any]) -> None:
    for value in values:
        if value not in allowed:
            raise SystemExit(f"{option} must be one of {', '.join(allowed)}; got {value!r}")


def _take_turns(optimizers: dict[str, torch.optim.Optimizer], turns: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(1 + turns):  # the first turn warms up
        for name, optimizer in optimizers.items():
            _synchronize()
            start = time.perf_counter()
            for _ in range(STEPS_PER_TURN):
                optimizer.step()
            _synchronize()
            times[name].append(1e3 * (time.perf_counter() - start) / STEPS_PER_TURN)
    return {name: median(values[1:]) for name, values in times.items()}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    held = [t for state in optimizer.state.values() for t in state.values()]
    # The published IF-Shampoo keeps its factors beside the state.
    for name in ("preconditioner", "preconditioner_momenta"):
        for factors in getattr(optimizer, name, []) or []:
            values = factors.values() if isinstance(factors, dict) else factors
            held += [m.to_dense() for m in values if hasattr(m, "to_dense")]
    return sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor))
