"""RF-Shampoo: Kronecker factors of S itself, without roots, inverted by Cholesky.

Layout: Ss[n] and its inverse, (b, d_n, d_n); G a stack of blocks (b, d_1..d_N).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature
from rootfree.rules import LEAST_DAMPING
from rootfree.rules.if_shampoo import exponents
from rootfree.structures import multiply_axis

# Largest tr H/tr S of a refresh, and √(tr H/D); beyond, H is scaled down. An outlier then does not
# leave the range of fp32, and stops a block only until S has forgotten the first factor.
GROWTH, LARGEST_ROOT = 1e4, 1e15


def update_factors_(
    Ss: Sequence[Tensor],
    inverses: Sequence[Tensor],
    H: BlockCurvature,
    *,
    beta2: Sequence[float],
    lam: float,
    gamma: float,
) -> None:
    """Sₙ <- (1-β₂γ)Sₙ + β₂/D₋ₙ·(B·G₍ₙ₎[⊗_{j≠n}Sⱼ⁻¹]G₍ₙ₎ᵀ + λ∏_{j≠n}tr(Sⱼ⁻¹)·I), and Sₙ⁻¹.

    All from the old factors, with β₂ of each axis; then Sₙ <- 4^-eₙ·Sₙ, Σeₙ = 0, which keeps them
    at one scale. tr H counts at most GROWTH·tr S.  Changes Ss and inverses.
    """
    H = _limited(H, Ss)
    means = [S_inv.diagonal(dim1=-2, dim2=-1).mean(-1) for S_inv in inverses]  # tr(Sⱼ⁻¹)/dⱼ
    for n, term in enumerate(H.contracted(inverses)):
        others = math.prod([t for j, t in enumerate(means) if j != n], start=means[n].new_ones(()))
        Ss[n].mul_(1 - beta2[n] * gamma).add_(term, alpha=beta2[n])
        damping = beta2[n] * max(lam, LEAST_DAMPING) * others
        Ss[n].diagonal(dim1=-2, dim2=-1).add_(damping.view(-1, 1))
    for S, S_inv, e in zip(Ss, inverses, exponents(means), strict=True):
        S.mul_(torch.exp2(-2 * e)[:, None, None])
        S_inv.copy_(inverse(S))


def _limited(H: BlockCurvature, Ss: Sequence[Tensor]) -> BlockCurvature:
    """H·min(1, GROWTH·tr S/tr H) in every block."""
    root = H.root_mean_diagonal([S.shape[-1] for S in Ss])
    size = root.new_ones(()) * math.sqrt(GROWTH)
    for S in Ss:  # √(tr S/D)
        size = size * S.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt()
    scale = (size.clamp(max=LARGEST_ROOT) / root).clamp(max=1.0)
    return H.for_operands(Ss[0].dtype, scale)


def inverse(S: Tensor) -> Tensor:
    """S⁻¹ of positive definite S by Cholesky, without waiting for the device.

    S is scaled to a unit diagonal first, which is all the conditioning a diagonal can give; a block
    whose factorisation breaks down all the same falls back to the inverse of its diagonal.
    """
    scale = S.diagonal(dim1=-2, dim2=-1).rsqrt()
    unit = scale.unsqueeze(-1) * S * scale.unsqueeze(-2)
    L, info = torch.linalg.cholesky_ex(unit)
    broken = (info != 0)[:, None, None]
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    L = torch.where(broken, eye, L)
    return scale.unsqueeze(-1) * torch.cholesky_inverse(L) * scale.unsqueeze(-2)


def precondition(G: Tensor, inverses: Sequence[Tensor]) -> Tensor:
    """U = G with Sₙ⁻¹ applied on every axis n."""
    for n, S_inv in enumerate(inverses):
        G = multiply_axis(G, n, partial(torch.matmul, S_inv))
    return G
