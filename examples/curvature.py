"""The same model trained by IFShampoo with each curvature: one figure, one table.

    python examples/curvature.py --out curvature.png

A small convolutional network on the 8 x 8 digits of scikit-learn. Every curvature gets the same
batches and the same start, and its best step size of a small grid (one seed). Needs
`pip install rootfree[lab]`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from digits import digits
from torch import nn

import rootfree
from rootfree.recorders import (
    HutchinsonDiagonal,
    KFACRecorder,
    MonteCarloFisherRecorder,
    PerExampleFisherRecorder,
)

# What the figure compares: a recorder of the model, or None for the default.
CURVATURES: dict[str, Callable[[nn.Module], Any]] = {
    "gradient outer product": lambda model: None,
    "KFAC, empirical": KFACRecorder,
    "KFAC, sampled": lambda model: KFACRecorder(model, fisher="monte-carlo", loss="cross_entropy"),
    "KFAC, type-2": lambda model: KFACRecorder(model, fisher="type-2", loss="cross_entropy"),
    "per-example Fisher": PerExampleFisherRecorder,
    "sampled Fisher": lambda model: MonteCarloFisherRecorder(model, loss="cross_entropy"),
    "diagonal Hessian": HutchinsonDiagonal,
}


def make_model() -> nn.Module:
    """The same start for all."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def train(name: str, *, lr: float, steps: int, batch: int) -> tuple[list[float], float, float]:
    """Training losses, test error in percent, and milliseconds a step."""
    X, Y, X_test, Y_test = digits()
    model = make_model()
    recorder = CURVATURES[name](model)
    optimizer = rootfree.IFShampoo(model.parameters(), lr=lr, batch_size=batch, curvature=recorder)
    generator = torch.Generator().manual_seed(1)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        chosen = torch.randint(len(X), (batch,), generator=generator)
        optimizer.zero_grad()
        if recorder is None:
            loss = nn.functional.cross_entropy(model(X[chosen]), Y[chosen])
            loss.backward()
        else:
            # IFShampoo refreshes its factors every second step: the others cost nothing extra.
            with recorder.when(step % 2 == 0):
                outputs = model(X[chosen])
                loss = nn.functional.cross_entropy(outputs, Y[chosen])
                recorder.backward(loss, outputs)
        optimizer.step()
        losses.append(float(loss.detach()))
    seconds = time.perf_counter() - start
    with torch.no_grad():
        wrong = (model(X_test).argmax(1) != Y_test).float().mean()
    return losses, 100 * float(wrong), 1000 * seconds / steps


def smooth(losses: list[float], window: int = 10) -> list[float]:
    """Means over the last steps."""
    return [
        sum(losses[max(0, t - window + 1) : t + 1]) / min(t + 1, window) for t in range(len(losses))
    ]


def best(losses: dict[float, list[float]]) -> float:
    """The step size with the smallest loss at the end; one that diverged is not chosen."""
    last = {lr: smooth(curve)[-1] for lr, curve in losses.items()}
    return min(last, key=lambda lr: last[lr] if math.isfinite(last[lr]) else math.inf)


def main(arguments: list[str] | None = None) -> None:
    """Train with every curvature, print the table, save the figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--lrs", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
    )
    parser.add_argument("--out", default="curvature.png", help="file of the figure")
    options = parser.parse_args(arguments)

    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    print(f"{'curvature':<24} {'lr':>7} {'loss':>8} {'test error':>10} {'ms a step':>10}")
    for name in CURVATURES:
        runs = {
            lr: train(name, lr=lr, steps=options.steps, batch=options.batch) for lr in options.lrs
        }
        lr = best({lr: run[0] for lr, run in runs.items()})
        losses, error, milliseconds = runs[lr]
        curve = smooth(losses)
        print(f"{name:<24} {lr:>7g} {curve[-1]:>8.4f} {error:>9.1f}% {milliseconds:>10.1f}")
        axes.semilogy(curve, label=f"{name} (lr {lr:g})")
    axes.set(xlabel="step", ylabel="training loss (mean of 10 steps)", title="IFShampoo on digits")
    axes.legend(fontsize="small")
    figure.savefig(options.out, dpi=150)
    print(f"figure: {options.out}")


if __name__ == "__main__":
    main()
