"""The paper in figures, first part: what a path does not depend on without the square root.

    python examples/paper_invariance.py --out invariance.png

1. Scale: with B, training on an averaged loss takes the steps of training on the summed loss.
2. Units: without the root, a path does not depend on the units of the parameters.

`rootfree verify` measures these claims, and more of them, to the last digit. Needs
`pip install rootfree[lab]`.
"""

import argparse

import torch
from curves import draw, losses
from torch import Tensor, nn

import rootfree

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--out", default="invariance.png", help="file of the figure")
options = parser.parse_args()

torch.manual_seed(0)
F64 = {"dtype": torch.float64}
X, y = torch.randn(12, 5, **F64), torch.randn(12, **F64)
PAPER = {
    "lr": 0.05,
    "momentum": 0.0,
    "nesterov": False,
    "max_update": None,
    "fast_start": False,
}


def scale(reduction: str, B: int, size: int) -> Tensor:
    """A regression on 12 examples; the loss is `size` times their mean, and is divided by it."""
    w = nn.Parameter(torch.zeros(5, **F64))
    optimizer = rootfree.RFRMSprop([w], damping=0.01 * size, batch_size=B, **PAPER)
    optimizer.state[w]["preconditioner"].fill_(size)  # a curvature, which has the loss's unit
    return losses(optimizer, lambda: nn.MSELoss(reduction=reduction)(X @ w, y), 30) / size


def units(millimetres: float, *, root: bool) -> Tensor:
    """A quadratic in p = A q; the optimizer has q."""
    A, q = torch.tensor([1.0, millimetres], **F64), nn.Parameter(torch.zeros(2, **F64))
    optimizer = torch.optim.RMSprop([q])
    if not root:
        optimizer = rootfree.RFRMSprop([q], damping=0.0, batch_size=1, **PAPER)
        optimizer.state[q]["preconditioner"].copy_(A.square())  # in units of 1/q²
    return losses(optimizer, lambda: (A * q - 1).square().sum(), 40)


panels = {
    "1. scale of the loss": {
        "mean, B = 12": scale("mean", 12, 1),
        "sum, B = 1": scale("sum", 1, 12),
        "mean, B left out": scale("mean", 1, 1),
    },
    "2. units of the parameters": {
        "RF-RMSProp, metres": units(1.0, root=False),
        "RF-RMSProp, millimetres": units(1e-3, root=False),
        "RMSProp, metres": units(1.0, root=True),
        "RMSProp, millimetres": units(1e-3, root=True),
    },
}
draw(options.out, panels)
