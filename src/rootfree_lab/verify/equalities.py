"""Ways to compute one thing that have to give the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rootfree_lab.verify.claim import Measured, below, claim, largest, relative_difference
from rootfree_lab.verify.draws import mixing, normal
from rootfree_lab.verify.methods import (
    IF_FACTOR,
    IF_SHAMPOO,
    MATRIX_METHODS,
    RF_FULL,
    RF_SHAMPOO,
    Method,
    inverses,
    walk,
)

STEPS = 12
# 12 steps, d = 12, conditioning below 1e3: roundings of 1e-16 may reach 1e-13 (of 40 seeds the
# worst gave 4e-15).
EQUAL = 1e-12


@claim("woodbury", "The rank-one formula gives the inverse of S.")
def woodbury(generator: torch.Generator) -> Measured:
    """The rank-one formula along a run against the inverse of the S that it stands for."""
    d, B, beta2 = 12, 7, 0.1
    differences = []
    for gamma in (0.0, 1.0):
        A = mixing(generator, d, d)
        p, S = nn.Parameter(normal(generator, d)), A.mT @ A
        options = {"batch_size": B, "precond_lr": beta2, "gamma": gamma, "damping": 0.0}
        optimizer = RF_FULL.make(p, [A], **options)
        for _ in range(STEPS):
            g = normal(generator, d)
            S = (1 - beta2 * gamma) * S + beta2 * B * torch.outer(g, g)
            (found,) = inverses(walk(optimizer, p, [g]))
            differences.append(relative_difference(found, torch.linalg.inv(S)))
    return below(largest(differences), EQUAL, f"d = {d}, {STEPS} steps, γ = 0 and 1")


@claim("one-factor", "IF-Shampoo with one factor is the factor form of the full-matrix method.")
def one_factor(generator: torch.Generator) -> Measured:
    """Method 7 on a vector and method 5, both against method 5 written out with matrices."""
    d, B, lam, gamma, beta2, lr = 6, 7, 0.2, 0.3, 0.2, 0.1
    eye = torch.eye(d, dtype=torch.float64)
    A0, w = mixing(generator, d, d), normal(generator, d)
    A = torch.linalg.inv(A0)
    ps = [nn.Parameter(w.clone()) for _ in range(2)]
    optimizers = [
        method.make(
            p, [A0], lr=lr, batch_size=B, momentum=0.0, precond_lr=beta2, damping=lam, gamma=gamma
        )
        for method, p in zip((IF_FACTOR, IF_SHAMPOO), ps, strict=True)
    ]
    differences = []
    for step in range(STEPS):
        g = 10.0 ** -(step % 2) * normal(generator, d)  # ‖h‖ above one, and below
        h = (A.mT @ (B * torch.outer(g, g) + lam * eye) @ A - gamma * eye) / 2
        A = A - beta2 * A @ h / max(1.0, h.norm().item())
        w = w - lr * A @ A.mT @ g
        for p, optimizer in zip(ps, optimizers, strict=True):
            (S_inv,) = inverses(walk(optimizer, p, [g]))
            differences.append(relative_difference(p.detach(), w))
            differences.append(relative_difference(S_inv, A @ A.mT))
    return below(largest(differences), EQUAL, f"d = {d}, {STEPS} steps, with damping")


@claim("one-axis", "RF-Shampoo with one axis is the full-matrix method.")
def one_axis(generator: torch.Generator) -> Measured:
    """Method 6 on a vector against method 3, along a run."""
    differences: list[float] = []
    for gamma, lam in ((0.0, 0.0), (1.0, 0.2)):
        A, w = mixing(generator, 6, 6), normal(generator, 6)
        ps = [nn.Parameter(w.clone()) for _ in range(2)]
        options = {"lr": 0.1, "batch_size": 7, "momentum": 0.5, "precond_lr": 0.2}
        optimizers = [
            method.make(p, [A], damping=lam, gamma=gamma, **options)
            for method, p in zip((RF_SHAMPOO, RF_FULL), ps, strict=True)
        ]
        for _ in range(STEPS):
            g = normal(generator, 6)
            found, wanted = (walk(o, p, [g]) for p, o in zip(ps, optimizers, strict=True))
            differences += map(relative_difference, inverses(found), inverses(wanted))
            differences.append(relative_difference(ps[0].detach(), ps[1].detach()))
    return below(largest(differences), EQUAL, f"d = 6, {STEPS} steps, with damping and without")


@claim("batched-blocks", "b blocks in one batched call are b separate calls.")
def batched_blocks(generator: torch.Generator) -> Measured:
    """Four blocks in one call, as parameters and cut from one, against an optimizer for each."""
    differences: list[float] = []
    for method in MATRIX_METHODS:
        starts = [normal(generator, 3, 4) for _ in range(4)]
        # Gradients of very different sizes: a block that leaks into another shows.
        gradients = [[10.0**-i * normal(generator, 3, 4) for i in range(4)] for _ in range(STEPS)]
        alone = [
            _final(method, [start], [[gs[i]] for gs in gradients])[0]
            for i, start in enumerate(starts)
        ]
        together = _final(method, starts, gradients)
        differences += map(relative_difference, together, alone)
        # Full-matrix blocks are runs of elements, Shampoo's are cut along both axes.
        join, size = (_two_by_two, 4) if method.kronecker else (torch.cat, 12)
        cut = _final(method, [join(starts)], [[join(gs)] for gs in gradients], block_size=size)
        differences.append(relative_difference(cut[0], join(alone)))
    return below(largest(differences), EQUAL, f"4 blocks, {len(MATRIX_METHODS)} methods")


def _final(
    method: Method, starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], **options: Any
) -> list[Tensor]:
    """The parameters after steps with the given gradients."""
    ps = [nn.Parameter(start.clone()) for start in starts]
    settings = {"lr": 0.1, "batch_size": 7, "precond_lr": 0.1, "damping": 0.1, "momentum": 0.5}
    optimizer = method.build(ps, **settings, **options)
    for gs in gradients:
        for p, g in zip(ps, gs, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in ps]


def _two_by_two(blocks: Sequence[Tensor]) -> Tensor:
    """Four blocks as one matrix."""
    return torch.cat([torch.cat(list(blocks[:2]), 1), torch.cat(list(blocks[2:]), 1)])
