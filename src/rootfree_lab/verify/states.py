"""The state that optimizers keep: positive definite in float32, and balanced without a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rootfree
from rootfree_lab.verify.claim import Measured, above, below, claim
from rootfree_lab.verify.draws import normal
from rootfree_lab.verify.methods import MATRIX_METHODS, inverses, walk

BLOCKS, SIDE = 100_000, 2


@claim(
    "positive-definite-state",
    "The preconditioners that the optimizers keep in float32 are positive definite.",
)
def positive_definite(generator: torch.Generator) -> Measured:
    """Least eigenvalue of S⁻¹ over the largest, float32, after rank-one gradients of all sizes."""
    ratios, steps = [], 60
    sizes = 10.0 ** (3 * torch.rand(steps, generator=generator) * (-1) ** torch.arange(steps))
    grads = [(c * normal(generator, 6, 1) @ normal(generator, 1, 5)).float() for c in sizes]
    for method in MATRIX_METHODS:
        p = nn.Parameter(torch.zeros(6, 5))
        options = {"precond_lr": 0.1, "gamma": 1.0, "damping": 1e-3}
        optimizer = method.build([p], lr=1e-3, batch_size=8, **options)
        for S_inv in inverses(walk(optimizer, p, grads)):
            if not (p.isfinite().all() and S_inv.isfinite().all()):
                return above(torch.nan, 0.0, f"{method.name} is no longer finite")
            values = torch.linalg.eigvalsh(S_inv.double())
            ratios.append(float(values.min() / values.max()))
    return above(min(ratios), 0.0, f"{len(MATRIX_METHODS)} methods, {steps} steps, sizes to 1e±3")


@claim(
    "balance-blocks", "The scales of 100,000 blocks' factors leave no trace in a step, not a bit."
)
def balance_of_blocks(generator: torch.Generator) -> Measured:
    """Entries of two trajectories that differ: with factors at one scale, and at another each."""
    shape = (BLOCKS * SIDE, SIDE)
    grads = [normal(generator, *shape).float() for _ in range(2)]
    powers = torch.exp2(torch.randint(-20, 21, (BLOCKS, 1, 1), generator=generator).float())
    moved: list[Tensor] = []
    for scale in (torch.ones_like(powers), powers):
        p = nn.Parameter(torch.zeros(shape))
        options: dict[str, Any] = {"update_every": 1, "block_size": SIDE, "init_scale": 1.0}
        optimizer = rootfree.IFShampoo([p], batch_size=8, **options)
        optimizer.state[p]["block0.factor0"].mul_(scale)
        optimizer.state[p]["block0.factor1"].div_(scale)
        walk(optimizer, p, grads)
        moved.append(p.detach())
    different = int((moved[0] != moved[1]).sum())
    return below(different, 1, f"{BLOCKS:,} blocks in float32, scales to 2^40 apart, 2 refreshes")
