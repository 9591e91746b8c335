"""The paper in figures, second part: methods without the square root, and without inverses.

    python examples/paper_inverse_free.py --out inverse_free.png

1. The inverse-free method follows the exact one, with an error of second order in β₂.
2. Training with and without the root, and without inverses, on digits.

`rootfree verify` measures these claims, and more of them, to the last digit. Needs
`pip install rootfree[lab]`.
"""

import argparse
from collections.abc import Callable

import torch
from curves import draw, losses
from digits import digits
from torch import Tensor, nn

import rootfree

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=200, help="of the training runs")
parser.add_argument("--out", default="inverse_free.png", help="file of the figure")
options = parser.parse_args()
images, labels, *_ = digits()


def step_of(method: type, rate: float) -> Tensor:
    """The first step of a full-matrix method with β₂ = rate, as in the paper."""
    w = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    w.grad = torch.linspace(-0.3, 0.4, 6, dtype=torch.float64)
    paper = {"gamma": 1.0, "batch_size": 1, "momentum": 0.0, "nesterov": False, "safeguard": False}
    method([w], lr=1.0, precond_lr=rate, **paper).step()
    return w.detach()


def difference(rate: float) -> Tensor:
    """How far one step without an inverse is from that with it."""
    return (step_of(rootfree.RFFullAdagrad, rate) - step_of(rootfree.IFFullAdagrad, rate)).norm()


def training(make: Callable[..., torch.optim.Optimizer], **given: int) -> Tensor:
    """Batches of 64, the method's defaults."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def loss() -> Tensor:
        chosen = torch.randint(len(images), (64,))
        return nn.functional.cross_entropy(model(images[chosen]), labels[chosen])

    # The groups of a matrix method have another step size for what they leave to AdamW.
    whole = make is torch.optim.AdamW
    params = model.parameters() if whole else rootfree.parameter_groups(model)
    return losses(make(params, **given), loss, options.steps)


rates = 2.0 ** -torch.arange(2, 9)
differences = torch.stack([difference(rate) for rate in rates.tolist()])
print(f"slope of the difference: {float((differences[-2] / differences[-1]).log2()):.3f}")
panels = {
    "1. inverse-free against exact": {"difference of a step": differences},
    "2. training on digits": {
        "AdamW (root)": training(torch.optim.AdamW),
        "RF-Shampoo": training(rootfree.RFShampoo, batch_size=64),
        "IF-Shampoo (no inverse)": training(rootfree.IFShampoo, batch_size=64),
        "IF-Whitening (root)": training(rootfree.IFWhitening),
    },
}
draw(options.out, panels, rates=rates)
