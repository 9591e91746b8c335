"""Full-matrix methods on S⁻¹: the exact rank-one inverse and the inverse-free covariance form.

Layout: S_inv (b, d, d), g (b, d), H (b, d, d).
"""

from __future__ import annotations

import torch
from torch import Tensor


def woodbury_(S_inv: Tensor, g: Tensor, *, beta2: float, B: int, gamma: float) -> None:
    """S⁻¹ of S <- (1-β₂γ)S + β₂B·ggᵀ, exactly, in O(d²).  Changes S_inv.

    With a = 1-β₂γ, v = S⁻¹g, q = gᵀv:  S⁻¹ <- (S⁻¹ - β₂B/(a + β₂Bq)·vvᵀ)/a.
    """
    a = 1 - beta2 * gamma
    v = apply(S_inv, g)
    q = (g * v).sum(-1)
    weight = -beta2 * B / (a + beta2 * B * q)
    S_inv.add_(weight.view(-1, 1, 1) * v.unsqueeze(-1) * v.unsqueeze(-2)).div_(a)


def if_covariance_rank_one_(
    S_inv: Tensor, g: Tensor, *, beta2: Tensor, B: int, gamma: float
) -> None:
    """Rule 4 for H = B·ggᵀ in O(d²), with β₂ (b, 1, 1).  Changes S_inv.

    With v = S⁻¹g, q = gᵀv:
      S⁻¹ <- (1 + β₂γ + β₂²γ²/2)·S⁻¹ + (-β₂B - β₂²γB + β₂²B²q/2)·vvᵀ
    """
    v = apply(S_inv, g)
    q = (g * v).sum(-1)[:, None, None]
    weight = -beta2 * B - beta2**2 * gamma * B + beta2**2 * B**2 * q / 2
    S_inv.mul_(1 + beta2 * gamma + (beta2 * gamma) ** 2 / 2)
    S_inv.add_(weight * v.unsqueeze(-1) * v.unsqueeze(-2))


def if_covariance_(S_inv: Tensor, H: Tensor, *, beta2: Tensor, gamma: float) -> None:
    """Rule 4 for any H, with β₂ (b, 1, 1).  Changes S_inv.

      S⁻¹ <- (1+β₂γ)S⁻¹ - β₂S⁻¹HS⁻¹ + β₂²/2·W,   W = S⁻¹HS⁻¹HS⁻¹ - 2γS⁻¹HS⁻¹ + γ²S⁻¹

    With S⁻¹ = AAᵀ and N = AᵀHA - γI the result is ½A[I + (I-β₂N)(I-β₂N)ᵀ]Aᵀ: positive definite
    for any β₂.
    """
    P = S_inv @ H @ S_inv  # S⁻¹HS⁻¹
    Q = P @ H @ S_inv  # S⁻¹HS⁻¹HS⁻¹
    S_inv.mul_(1 + beta2 * gamma + (beta2 * gamma) ** 2 / 2)
    S_inv.sub_((beta2 + beta2**2 * gamma) * P).add_(beta2**2 / 2 * Q)
    # The products are symmetric only up to rounding; left alone, the difference would grow.
    S_inv.copy_((S_inv + S_inv.mT) / 2)


def apply(S_inv: Tensor, g: Tensor) -> Tensor:
    """U = S⁻¹g."""
    return torch.matmul(S_inv, g.unsqueeze(-1)).squeeze(-1)
