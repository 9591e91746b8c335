"""Losses of a run, and figures of them: what the examples with figures share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
from matplotlib.figure import Figure
from torch import Tensor


def losses(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int) -> Tensor:
    """The loss before each step."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(loss())
        found[-1].backward()
        optimizer.step()
    return torch.stack(found).detach()


def draw(file: str, panels: dict[str, dict[str, Tensor]], *, rates: Tensor | None = None) -> None:
    """Curves by title and name, in one figure; the last value of each is printed.

    `rates`: what the first panel has on its other axis, in place of the number of the step.
    """
    figure = Figure(figsize=(6 * len(panels), 4.2), layout="constrained")
    for i, (title, curves) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), i + 1)
        for (name, curve), style in zip(curves.items(), cycle(("-", "--", ":", "-."))):
            print(f"{title:<30} {name:<24} {float(curve[-1]):.6g}")
            if rates is not None and i == 0:
                axes.loglog(rates, curve, "o-", label=name)
            else:
                axes.semilogy(curve, style, label=name)
        axes.set(title=title, xlabel="step" if rates is None or i > 0 else "β₂")
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
