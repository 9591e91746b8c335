"""Half-precision products: the factors' trajectory against that of float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rootfree_lab.verify.claim import Measured, below, largest, normal, relative_difference
from rootfree_lab.verify.methods import IF_SHAMPOO

SHAPE, TERMS, STEPS = (24, 32), 64, 100
BETAS = (0.003, 0.05, 0.2, 0.5)


def bf16_factors(generator: torch.Generator, *, norm: str) -> Measured:
    """How far Kₙ - I is from float32's after a run with bf16 products on the same gradients."""
    gradients = _least_squares_gradients(generator)
    worst = {
        beta2: largest(
            map(
                relative_difference,
                _movements(gradients, beta2, norm, torch.bfloat16),
                _movements(gradients, beta2, norm, torch.float32),
            )
        )
        for beta2 in BETAS
    }
    each = ", ".join(f"{value:.1e} at β₂ = {beta2:g}" for beta2, value in worst.items())
    return below(largest(worst.values()), 0.02, f"{STEPS} steps: {each}")


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


def _movements(
    gradients: list[Tensor], beta2: float, norm: str, dtype: torch.dtype
) -> list[Tensor]:
    """Kₙ - I of both axes after the gradients, products in `dtype`."""
    p = nn.Parameter(torch.zeros(SHAPE))
    options = {"precond_lr": beta2, "factor_norm": norm, "matmul_dtype": dtype}
    optimizer = IF_SHAMPOO.build([p], lr=0.0, batch_size=TERMS, damping=1e-3, **options)
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    factors = [optimizer.state[p][f"block0.factor{n}"][0] for n in range(2)]
    return [K - torch.eye(len(K)) for K in factors]
