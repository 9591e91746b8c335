"""Optimizer steps, timed side by side in one process and given as ratios.

Machines are shared and noisy: the optimizers take turns, one step each, and the median of each is
compared, so that a slow moment hits all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from rich.table import Table

import rootfree
from rootfree_lab.shapes import SHAPE_SETS

Parameters = list[torch.nn.Parameter]

REFERENCE = "torch RMSprop, foreach, momentum"

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    REFERENCE: lambda ps: torch.optim.RMSprop(ps, lr=1e-4, momentum=0.9, foreach=True),
    "torch AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=True),
    "RFRMSprop": lambda ps: rootfree.RFRMSprop(ps, lr=1e-4, batch_size=128),
    "RFAdamW": lambda ps: rootfree.RFAdamW(ps, lr=1e-4, batch_size=128),
}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_bench(shapes: str, *, steps: int, warm_up: int = 2) -> Table:
    """Median milliseconds a step, ratio to torch's RMSprop, state bytes a parameter."""
    if shapes not in SHAPE_SETS:
        raise SystemExit(f"--shapes must be one of {', '.join(SHAPE_SETS)}; got {shapes!r}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    gradients = [1e-3 * torch.randn(shape, device=device) for shape in SHAPE_SETS[shapes]()]
    optimizers = {}
    for name, factory in OPTIMIZERS.items():
        parameters = [torch.nn.Parameter(torch.randn_like(g)) for g in gradients]
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        optimizers[name] = factory(parameters)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(warm_up + steps):
        for name, optimizer in optimizers.items():
            _synchronize()
            start = time.perf_counter()
            optimizer.step()
            _synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    count = sum(g.numel() for g in gradients)
    medians = {name: median(values[warm_up:]) for name, values in times.items()}
    table = Table(title=f"{shapes}, {count / 1e6:.1f} M parameters, {device}, {steps} steps")
    table.add_column("optimizer")
    for heading in ("ms a step", "ratio", "state bytes a parameter"):
        table.add_column(heading, justify="right")
    for name, optimizer in optimizers.items():
        held = sum(
            t.numel() * t.element_size()
            for state in optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor)
        )
        ratio = medians[name] / medians[REFERENCE]
        table.add_row(name, f"{medians[name]:.2f}", f"{ratio:.2f}", f"{held / count:.1f}")
    return table
