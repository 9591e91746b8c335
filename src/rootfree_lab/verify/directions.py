"""Single directions: near an optimum without the root, and what the root does to a scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rootfree_lab.verify.claim import Measured, claim, largest, relative_difference
from rootfree_lab.verify.draws import normal
from rootfree_lab.verify.methods import RF_RMSPROP, walk

EQUAL = 1e-12


@claim(
    "bounded-direction",
    "RF-RMSProp: the direction stays bounded when the gradient vanishes, or explodes.",
)
def bounded(generator: torch.Generator) -> Measured:
    """g/s with s = (1-β₂) + β₂g², for g from 1e-8 to 1e8: at most 1/(2√(β₂(1-β₂))).

    With s = g², an average of the last gradient alone, it is 1/g: without bound near an optimum.
    """
    g = 10 ** (16 * torch.rand(10_000, generator=generator, dtype=torch.float64) - 8)
    bound = lambda beta2: 1 / (2 * math.sqrt(beta2 * (1 - beta2)))  # noqa: E731
    figure = largest(float(_direction(g, b).max()) / bound(b) for b in (0.01, 0.1, 0.5, 0.9))
    without = float(_direction(g, 1.0).max())
    return Measured(
        figure,
        "≤ 1",
        0.9 < figure < 1 + EQUAL and without > 1e7,
        f"times the bound; with s = g² {without:.0e}",
    )


def _direction(g: Tensor, beta2: float) -> Tensor:
    """The first step of RF-RMSProp from s = 1, at lr = 1."""
    p = nn.Parameter(torch.zeros_like(g))
    options = {"precond_lr": beta2, "momentum": 0.0, "damping": 0.0}
    optimizer = RF_RMSPROP.build([p], lr=1.0, batch_size=1, **options)
    walk(optimizer, p, [g])
    return -p.detach()


@claim(
    "root-scale",
    "With the root, directions do not depend on the loss's scale, but s is then no curvature.",
)
def root_and_scale(generator: torch.Generator) -> Measured:
    """The exponent with which s grows when the loss is multiplied by c: a curvature's is one.

    With the root, directions do not depend on c, but s has the exponent two. Without it, the sum of
    B terms in the place of their mean is a loss times B, and s has the exponent one.
    """
    B, steps = 20, 12
    grads = [normal(generator, 12) for _ in range(steps)]
    with_root = [_rmsprop([c * g for g in grads]) for c in (1.0, 1.0 * B)]
    (p, s), (q, t) = with_root
    same = relative_difference(q, p)
    rooted = _exponent(t, s, B)
    free = [_root_free([c * g for g in grads], B // c) for c in (1, B)]
    exponent = _exponent(free[1], free[0], B)
    return Measured(
        exponent,
        "1, root: 2",
        same < EQUAL and abs(rooted - 2) < EQUAL and abs(exponent - 1) < EQUAL,
        f"with the root {rooted:.3g}, directions apart by {same:.0e}",
    )


def _exponent(large: Tensor, small: Tensor, c: float) -> float:
    return float((large / small).log().mean() / math.log(c))


def _rmsprop(grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    p = nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = torch.optim.RMSprop([p], lr=1.0, eps=0.0)
    return p.detach(), walk(optimizer, p, grads)["square_avg"]


def _root_free(grads: list[Tensor], B: int) -> Tensor:
    """s of RF-RMSProp from S₀ ∝ the scale: it starts at zero here, which scales alike."""
    p = nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = RF_RMSPROP.build([p], batch_size=B, precond_lr=0.1)
    optimizer.state[p]["preconditioner"].zero_()
    return walk(optimizer, p, grads)["preconditioner"]
