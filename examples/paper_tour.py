"""What becomes of adaptive methods without the square root, in four figures.

    python examples/paper_tour.py --out tour.png

1. Scale: with B, training on an averaged loss takes the steps of training on the summed loss.
2. Coordinates: without the root, a path does not depend on the units of the parameters.
3. No inverses: the inverse-free method follows the exact one, with an error of second order in β₂.
4. Training: with and without the root, and without inverses, on digits.

`rootfree verify` measures these claims, and more of them, to the last digit. Needs
`pip install rootfree[lab]`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from digits import digits
from torch import Tensor, nn

import rootfree

Curves = dict[str, Tensor]
#: The paper's RF-RMSProp: no momentum, no limits on steps.
PAPER = {"momentum": 0.0, "nesterov": False, "max_update": None}


def scale(steps: int = 30) -> Curves:
    """Distance from the start of RF-RMSProp, for the mean over 12 examples and for their sum."""
    generator = torch.Generator().manual_seed(0)
    X, y = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((12, 5), (12,)))

    def run(reduction: str, B: int, size: float) -> Tensor:
        w = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        options = {**PAPER, "lr": 0.05, "damping": 1e-2 * size, "batch_size": B}
        optimizer = rootfree.RFRMSprop([w], **options)
        optimizer.state[w]["preconditioner"].fill_(size)  # a curvature, too
        path = []
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(X @ w, y, reduction=reduction).backward()
            optimizer.step()
            path.append(w.detach().norm())
        return torch.stack(path)

    return {
        "mean, B = 12": run("mean", 12, 1.0),
        "sum, B = 1": run("sum", 1, 12.0),
        "mean, B left out": run("mean", 1, 1.0),
    }


def coordinates(steps: int = 40) -> Curves:
    """Losses of one quadratic, with a parameter in metres and in millimetres."""
    target = torch.tensor([1.0, 1.0], dtype=torch.float64)

    def run(make: Any, units: list[float], **options: Any) -> Tensor:
        A = torch.tensor(units, dtype=torch.float64)  # p = A q
        q = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = make([q], **options)
        if isinstance(optimizer, rootfree.RFRMSprop):
            optimizer.state[q]["preconditioner"].copy_(A.square())  # S₀ changes its units as well
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (A * q - target).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    free = {**PAPER, "lr": 0.05, "damping": 0.0, "batch_size": 1}
    return {
        "RF-RMSProp, metres": run(rootfree.RFRMSprop, [1.0, 1.0], **free),
        "RF-RMSProp, millimetres": run(rootfree.RFRMSprop, [1.0, 1e-3], **free),
        "RMSProp, metres": run(torch.optim.RMSprop, [1.0, 1.0], lr=0.01),
        "RMSProp, millimetres": run(torch.optim.RMSprop, [1.0, 1e-3], lr=0.01),
    }


def first_order() -> tuple[Tensor, Tensor]:
    """β₂, and the difference of one step of the inverse-free method from the exact one."""
    rates = 2.0 ** -torch.arange(2, 9, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(6, generator=generator, dtype=torch.float64) / 4
    found = []
    for rate in rates.tolist():
        steps = []
        for method in (rootfree.RFFullAdagrad, rootfree.IFFullAdagrad):
            w = nn.Parameter(torch.zeros(6, dtype=torch.float64))
            bare = {"momentum": 0.0, "nesterov": False, "safeguard": False}
            optimizer = method([w], lr=1.0, precond_lr=rate, gamma=1.0, batch_size=1, **bare)
            w.grad = gradient.clone()
            optimizer.step()
            steps.append(w.detach())
        found.append((steps[0] - steps[1]).norm())
    return rates, torch.stack(found)


def training(steps: int) -> Curves:
    """Losses on digits, batches of 64, each method with its defaults."""
    X, Y, *_ = digits()
    methods = {
        "AdamW (root)": lambda model: torch.optim.AdamW(model.parameters()),
        "RF-Shampoo": lambda model: rootfree.RFShampoo(groups(model), batch_size=64),
        "IF-Shampoo (no inverse)": lambda model: rootfree.IFShampoo(groups(model), batch_size=64),
        "IF-Whitening (root)": lambda model: rootfree.IFWhitening(groups(model)),
    }
    groups = rootfree.parameter_groups
    curves = {}
    for name, make in methods.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        optimizer = make(model)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(steps):
            chosen = torch.randint(len(X), (64,), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(X[chosen]), Y[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        curves[name] = torch.stack(losses)
    return curves


def main(arguments: list[str] | None = None) -> None:
    """Compute everything, print what the figures show, save them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of the training runs")
    parser.add_argument("--out", default="tour.png", help="file of the figure")
    options = parser.parse_args(arguments)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    (one, two), (three, four) = figure.subplots(2, 2)
    panels = [
        (one, "1. scale of the loss", scale(), "distance from the start"),
        (two, "2. units of the parameters", coordinates(), "loss"),
        (four, "4. training on digits", training(options.steps), "loss"),
    ]
    for axes, title, curves, what in panels:
        for (name, curve), style in zip(curves.items(), ("-", "--", ":", "-."), strict=False):
            (axes.plot if axes is one else axes.semilogy)(curve, style, label=name)
            print(f"{title:<28} {name:<26} {float(curve[-1]):.6g}")
        axes.set(title=title, xlabel="step", ylabel=what)
        axes.legend(fontsize="small")
    rates, differences = first_order()
    slope = float((differences[-2] / differences[-1]).log2())
    print(f"{'3. no inverses':<28} {'slope of the difference':<26} {slope:.3f}")
    three.loglog(rates, differences, "o-", label=f"slope {slope:.2f}")
    three.set(title="3. inverse-free against exact", xlabel="β₂", ylabel="difference of a step")
    three.legend(fontsize="small")
    figure.savefig(options.out, dpi=120)
    print(f"figure: {options.out}")


if __name__ == "__main__":
    main()
