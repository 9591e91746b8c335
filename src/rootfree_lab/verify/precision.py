"""Half-precision products: the factors' trajectory against that of float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rootfree.structures import make_structure
from rootfree_lab.verify.claim import Measured, below, claim, largest, relative_difference
from rootfree_lab.verify.draws import normal
from rootfree_lab.verify.methods import IF_SHAMPOO, walk

SHAPE, TERMS, STEPS = (24, 32), 64, 100
BETAS = (0.003, 0.05, 0.2, 0.5)


def bf16_factors(generator: torch.Generator, *, norm: str) -> Measured:
    """How far Kₙ - I is from float32's after a run with bf16 products on the same gradients."""
    gradients = _least_squares_gradients(generator)
    worst = {beta2: _apart(gradients, beta2, norm) for beta2 in BETAS}
    each = ", ".join(f"{value:.1e} at β₂ = {beta2:g}" for beta2, value in worst.items())
    return below(largest(worst.values()), 0.02, f"{STEPS} steps: {each}")


for _norm in ("frobenius", "spectral"):
    _sentence = f"With bf16 products and the {_norm} norm the factors keep to float32 within 2 %."
    claim(f"bf16-{_norm}", _sentence, norm=_norm)(bf16_factors)


@claim("bf16-structures", "So do factors of other structures, with bf16 products.")
def bf16_structures(generator: torch.Generator) -> Measured:
    """The same for factors of other structures."""
    gradients = _least_squares_gradients(generator)
    structures = ("lower_triangular", "hierarchical:4")
    worst = {each: _apart(gradients, 0.05, "spectral", structure=each) for each in structures}
    each = ", ".join(f"{value:.1e} {structure}" for structure, value in worst.items())
    return below(largest(worst.values()), 0.02, each)


@claim(
    "bf16-stored",
    "Factors that are kept in bf16, rounded stochastically, move as those in float32 do.",
)
def bf16_stored(generator: torch.Generator) -> Measured:
    """Factors kept in bfloat16: rounded stochastically they follow float32's, and do not freeze.

    Each has the movement of float32's within the noise of rounding, which averages out.
    """
    gradients = _least_squares_gradients(generator)
    true = _movements(gradients, 0.01, "spectral", torch.float32)
    found = _movements(gradients, 0.01, "spectral", torch.float32, factor_dtype=torch.bfloat16)
    along = [float((x * y).sum() / y.square().sum()) for x, y in zip(found, true, strict=True)]
    figure = largest(abs(a - 1) for a in along)
    each = ", ".join(f"{a:.3f}" for a in along)
    return below(figure, 0.1, f"{STEPS} steps at β₂ = 0.01; movement along float32's {each}")


def _least_squares_gradients(generator: torch.Generator) -> list[Tensor]:
    """Mini-batch gradients of ½‖Wx - y‖² along a run of plain gradient descent."""
    target, W = normal(generator, *SHAPE), torch.zeros(SHAPE, dtype=torch.float64)
    gradients = []
    for _ in range(STEPS):
        x = normal(generator, TERMS, SHAPE[1])
        noise = normal(generator, TERMS, SHAPE[0])
        g = (x @ (W - target).mT - noise).mT @ x / TERMS
        W = W - 0.02 * g
        gradients.append(g.float())
    return gradients


def _apart(gradients: list[Tensor], beta2: float, norm: str, **more: Any) -> float:
    """How far Kₙ - I with bf16 products is from float32's."""
    dtypes = (torch.bfloat16, torch.float32)
    moved = (_movements(gradients, beta2, norm, dtype, **more) for dtype in dtypes)
    return largest(map(relative_difference, *moved))


def _movements(
    gradients: list[Tensor], beta2: float, norm: str, dtype: torch.dtype, **more: Any
) -> list[Tensor]:
    """Kₙ - I of both axes after the gradients, products in `dtype`, as the state keeps it."""
    p = nn.Parameter(torch.zeros(SHAPE))
    options = {"precond_lr": beta2, "factor_norm": norm, "matmul_dtype": dtype, **more}
    optimizer = IF_SHAMPOO.build([p], lr=0.0, batch_size=TERMS, damping=1e-3, **options)
    state = walk(optimizer, p, gradients)
    structures = [make_structure(more.get("structure", "dense"), d) for d in SHAPE]
    factors = [s.unpack(state[f"block0.factor{n}"].float())[0] for n, s in enumerate(structures)]
    return [K - torch.eye(len(K)) for K in factors]
