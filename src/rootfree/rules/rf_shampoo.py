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
from rootfree.structures.base import products_of_others

# Largest tr H/tr S of a refresh, and √(tr H/D); beyond, H is scaled down. An outlier then does not
# leave the range of fp32, and stops a block only until S has forgotten the first factor.
GROWTH, LARGEST_ROOT = 1e4, 1e15


def update_factors_(
    Ss: Sequence[Tensor],
    inverses: Sequence[Tensor],
    H: BlockCurvature,
    *,
    beta2: Sequence[float | Tensor],
    lam: float,
    gamma: float,
    norm: str | None,
) -> None:
    """Sₙ <- Sₙ + β₂/max(1, ‖Δₙ‖)·Δₙ, Δₙ = Tₙ - γSₙ, and Sₙ⁻¹.

    Tₙ = (B·G₍ₙ₎[⊗_{j≠n}Sⱼ⁻¹]G₍ₙ₎ᵀ + λ∏_{j≠n}tr(Sⱼ⁻¹)·I)/D₋ₙ. All from the old factors, with β₂ of
    each axis; then Sₙ <- 4^-eₙ·Sₙ, Σeₙ = 0, which keeps them at one scale. tr H counts at most
    GROWTH·tr S.  Changes Ss and inverses.
    """
    H = _limited(H, Ss)
    means = [S_inv.diagonal(dim1=-2, dim2=-1).mean(-1) for S_inv in inverses]  # tr(Sⱼ⁻¹)/dⱼ
    others = products_of_others(means, start=means[0].new_ones(()))
    for n, term in enumerate(H.contracted(inverses)):
        term.diagonal(dim1=-2, dim2=-1).add_((max(lam, LEAST_DAMPING) * others[n]).view(-1, 1))
        change = term.sub_(Ss[n], alpha=gamma)
        rate = beta2[n] * size_beside(inverses[n], change, norm).clamp(min=1.0).reciprocal()
        Ss[n].addcmul_(change, rate[:, None, None])
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


def size_beside(S_inv: Tensor, change: Tensor, norm: str | None) -> Tensor:
    """½‖S^{-½} Δ S^{-½}‖ (b,): how far Δ moves S, measured by S itself; 1 without a norm.

    It is the norm of inverse-free Shampoo's tangent vector, K = S^{-½}, from powers of S⁻¹Δ, which
    has the same eigenvalues μ. The spectral one is (Σμ⁴)^¼, from above.
    """
    if norm is None:
        return change.new_ones(len(change))
    X = S_inv @ change
    largest = X.abs().amax((1, 2)).clamp(min=torch.finfo(X.dtype).tiny)
    X = X / largest[:, None, None]  # the fourth power of a large number has no place in fp32
    if norm == "spectral":
        X = X @ X
    moment = (X * X.mT).sum((1, 2)).clamp(min=0.0)
    return largest * moment.pow(0.25 if norm == "spectral" else 0.5) / 2


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
