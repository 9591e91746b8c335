"""The covariance form of the inverse-free full-matrix method (rule 4), for any symmetric H.

With S⁻¹ = AAᵀ and N = AᵀHA - γI it is ½A[I + (I-β₂N)(I-β₂N)ᵀ]Aᵀ, hence at least ½S⁻¹.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rootfree.rules import full_matrix
from rootfree_lab.verify.claim import Measured, below, claim, largest
from rootfree_lab.verify.draws import mixing, normal

GAMMAS = (0.0, 0.5, 1.0)
EQUAL = 1e-12  # some ten products of 1e-16 each, conditioning 16; of 40 seeds the worst gave 2e-15


def _draws(generator: torch.Generator, b: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """A, symmetric H of either sign, and β₂ from 0.001 to 10."""
    A, X = mixing(generator, b, d, d), normal(generator, b, d, d)
    beta2 = 10 ** (4 * torch.rand(b, 1, 1, generator=generator, dtype=torch.float64) - 3)
    return A, X + X.mT, beta2


@claim(
    "positive-definite",
    "The covariance form keeps S⁻¹ positive definite for any β₂ (at least half the old one).",
)
def positive_definite(generator: torch.Generator) -> Measured:
    """The smallest eigenvalue of the new S⁻¹ in the frame of the old one, where that is I."""
    draws, d = 20_000, 3
    smallest, without = [], []
    for gamma in GAMMAS:
        A, H, beta2 = _draws(generator, draws, d)
        S_inv = A @ A.mT
        full_matrix.if_covariance_(S_inv, H, beta2=beta2, gamma=gamma)
        inner = torch.linalg.solve(A, torch.linalg.solve(A, S_inv).mT)  # A⁻¹S⁻¹A⁻ᵀ
        smallest.append(torch.linalg.eigvalsh(inner).min())
        N = A.mT @ H @ A - gamma * torch.eye(d, dtype=torch.float64)
        without.append((1 - beta2[:, 0] * torch.linalg.eigvalsh(N)).min())
    figure = torch.stack(smallest).min().item()
    return Measured(
        figure,
        "≥ 0.5",
        figure > 0.5 - 1e-9,
        f"{len(GAMMAS) * draws:,} draws, β₂ to 10, H of either sign; "
        f"without the W term {min(without):.0f}",
    )


@claim("covariance-square", "The covariance form is ½A[I + (I-β₂N)(I-β₂N)ᵀ]Aᵀ, N = AᵀHA - γI.")
def square(generator: torch.Generator) -> Measured:
    """Rule 4 against the square that it is."""
    eye = torch.eye(4, dtype=torch.float64)
    differences = []
    for gamma in GAMMAS:
        A, H, beta2 = _draws(generator, 200, 4)
        S_inv = A @ A.mT
        full_matrix.if_covariance_(S_inv, H, beta2=beta2, gamma=gamma)
        M = eye - beta2 * (A.mT @ H @ A - gamma * eye)
        differences.append(_largest_of_blocks(S_inv, A @ (eye + M @ M.mT) @ A.mT / 2))
    return below(largest(differences), EQUAL, "600 draws, β₂ to 10, H of either sign")


@claim("covariance-rank-one", "The covariance form in O(d²) for H = B·ggᵀ is the general one.")
def rank_one(generator: torch.Generator) -> Measured:
    """The form of rule 4 for H = B·ggᵀ, in O(d²), against the general one."""
    B = 7
    differences = []
    for gamma in GAMMAS:
        A, _, beta2 = _draws(generator, 200, 4)
        S_inv, g = A @ A.mT, normal(generator, 200, 4)
        general = S_inv.clone()
        H = B * g.unsqueeze(2) * g.unsqueeze(1)
        full_matrix.if_covariance_(general, H, beta2=beta2, gamma=gamma)
        full_matrix.if_covariance_rank_one_(S_inv, g, beta2=beta2, B=B, gamma=gamma)
        differences.append(_largest_of_blocks(S_inv, general))
    return below(largest(differences), EQUAL, f"600 draws, β₂ to 10, B = {B}")


def _largest_of_blocks(x: Tensor, y: Tensor) -> float:
    """The largest relative difference among the blocks of two stacks."""
    return float(((x - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).max())
