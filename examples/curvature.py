"""One network trained by IFShampoo with each curvature: a table and a figure.

    python examples/curvature.py --out curvature.png

Every curvature gets the same start, the same batches, and its best step size of `--lrs` (one seed).
Needs `pip install rootfree[lab]`.
"""

import argparse
import time
from contextlib import nullcontext

import torch
from digits import accuracy, digits
from matplotlib.figure import Figure
from torch import nn

import rootfree

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--lrs", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1, 0.3])
parser.add_argument("--out", default="curvature.png", help="file of the figure")
options = parser.parse_args()

B, (X, Y, *_) = 64, digits()
KFAC, CE = rootfree.KFACRecorder, "cross_entropy"
CURVATURES = {
    "gradient outer product": lambda model: None,
    "KFAC, empirical": KFAC,
    "KFAC, sampled": lambda model: KFAC(model, fisher="monte-carlo", loss=CE),
    "KFAC, type-2": lambda model: KFAC(model, fisher="type-2", loss=CE),
    "per-example Fisher": rootfree.PerExampleFisherRecorder,
    "sampled Fisher": lambda model: rootfree.MonteCarloFisherRecorder(model, loss=CE),
    "diagonal Hessian": rootfree.HutchinsonDiagonal,
}


def train(name: str, lr: float) -> tuple[torch.Tensor, float, float]:
    """Losses (means of ten steps), test error in percent, milliseconds a step."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()]
    linear = [nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10)]
    model = nn.Sequential(*convolutions, *linear)
    recorder = CURVATURES[name](model)
    optimizer = rootfree.IFShampoo(model.parameters(), lr=lr, batch_size=B, curvature=recorder)
    generator, losses, start = torch.Generator().manual_seed(1), [], time.perf_counter()
    for _ in range(options.steps):
        chosen = torch.randint(len(X), (B,), generator=generator)
        optimizer.zero_grad()
        # A step that does not refresh the factors needs no curvature, and costs nothing extra.
        with nullcontext() if recorder is None else recorder.when(optimizer.refreshes_next):
            outputs = model(X[chosen])
            loss = nn.functional.cross_entropy(outputs, Y[chosen])
            loss.backward() if recorder is None else recorder.backward(loss, outputs)
        optimizer.step()
        losses.append(loss.detach())
    milliseconds = 1000 * (time.perf_counter() - start) / options.steps
    means = torch.stack(losses).unfold(0, min(10, options.steps), 1).mean(1)
    return means, 100 - accuracy(model), milliseconds


figure = Figure(layout="constrained")
axes = figure.subplots()
print(f"{'curvature':<24} {'lr':>7} {'loss':>8} {'test error':>10} {'ms a step':>10}")
for name in CURVATURES:
    runs = {lr: train(name, lr) for lr in options.lrs}
    lr = min(runs, key=lambda lr: runs[lr][0][-1].nan_to_num(torch.inf))  # none that diverged
    losses, error, milliseconds = runs[lr]
    print(f"{name:<24} {lr:>7g} {losses[-1]:>8.4f} {error:>9.1f}% {milliseconds:>10.1f}")
    axes.semilogy(losses, label=f"{name} (lr {lr:g})")
axes.set(xlabel="step", ylabel="training loss (mean of 10 steps)", title="IFShampoo on digits")
axes.legend()
figure.savefig(options.out, dpi=150)
