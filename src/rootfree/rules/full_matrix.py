"""Full-matrix methods on S⁻¹: the exact rank-one inverse and the inverse-free covariance form.

Layout: S_inv (b, d, d), g (b, d), H (b, d, d). Scalings by powers of two are exact: they keep the
products inside the range of fp32 and change no bit of a result that was inside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature
from rootfree.structures.base import SLACK, power_of_two

# With γ > 0 and λ = 0 the inverse would grow for ever in a direction that gets no gradient. It
# stops here, where products with it are still far from the end of fp32.
LARGEST_INVERSE = 1e15
# √(tr H/d) beyond which curvature is as good as infinite; its square has a place in fp32.
LARGEST_ROOT = 1e15


def in_range(H: BlockCurvature, d: int, dtype: torch.dtype) -> tuple[BlockCurvature, Tensor]:
    """c²H with c = min(1, LARGEST_ROOT/√(tr H/d)) (b,), and c: what S may grow by in fp32."""
    c = (LARGEST_ROOT / H.root_mean_diagonal((d,))).clamp(max=1.0).to(dtype)
    return H.for_operands(dtype, c), c


def woodbury_(
    S_inv: Tensor, g: Tensor, *, beta2: float, B: int, gamma: float
) -> tuple[Tensor, Tensor]:
    """S⁻¹ of S <- (1-β₂γ)S + β₂B·ggᵀ, exactly, in O(d²).  Changes S_inv.

    With a = 1-β₂γ, v = S⁻¹g, q = gᵀv:  S⁻¹ <- (S⁻¹ - β₂B/(a + β₂Bq)·vvᵀ)/a.

    Returns S⁻¹g = v/(a + β₂Bq), and (b, 1) where it can be had in no other way: there the new S⁻¹
    is the difference of nearly equal numbers, and g is large.
    """
    a = 1 - beta2 * gamma
    v = apply(S_inv, g)
    q = (g * v).sum(-1)
    diagonal = S_inv.diagonal(dim1=-2, dim2=-1)
    # What cancellation leaves of the diagonal; exactly it is at least S⁻¹ᵢᵢ/(a + β₂Bq).
    least = 0.999 * diagonal / (a + beta2 * B * q).unsqueeze(-1)
    weight = -beta2 * B / (a + beta2 * B * q)
    S_inv.add_(weight.view(-1, 1, 1) * v.unsqueeze(-1) * v.unsqueeze(-2)).div_(a)
    torch.maximum(diagonal, least, out=diagonal)
    _symmetrise_(S_inv)
    limit_(S_inv)
    cancels = beta2 * B * q > torch.finfo(S_inv.dtype).eps ** -0.5
    return v / (a + beta2 * B * q).unsqueeze(-1), cancels.unsqueeze(-1)


def if_factor_rank_one_(A: Tensor, g: Tensor, *, beta2: float, B: int, norm: str | None) -> None:
    """Rule 5 with γ = λ = 0 for H = B·ggᵀ in O(d²), S⁻¹ = AAᵀ.  Changes A.

    With w = Aᵀg the tangent vector m = ½B·wwᵀ has one norm, ‖m‖ = ½B·wᵀw:
      A <- A(I - β₂m/max(1, ‖m‖)) = A - ½β₂B/max(1, ‖m‖)·(Aw)wᵀ
    """
    w = apply(A.mT, g)
    m = B / 2 * w.square().sum(-1)
    size = {None: torch.ones_like(m), "frobenius": m, "spectral": m * SLACK}[norm].clamp(min=1.0)
    A.baddbmm_((apply(A, w) * (-beta2 * B / 2 / size)[:, None]).unsqueeze(-1), w.unsqueeze(-2))


def if_covariance_rank_one_(
    S_inv: Tensor, g: Tensor, *, beta2: Tensor, B: int | Tensor, gamma: float
) -> None:
    """Rule 4 for H = B·ggᵀ in O(d²), with β₂ (b, 1, 1).  Changes S_inv.

    With v = S⁻¹g, q = gᵀv:
      S⁻¹ <- (1 + β₂γ + β₂²γ²/2)·S⁻¹ + (-β₂B - β₂²γB + β₂²B²q/2)·vvᵀ
    """
    v = apply(S_inv, g)
    q = (g * v).sum(-1)[:, None, None]
    root = power_of_two((B * q).clamp(min=1.0).sqrt())  # c = root² is about Bq
    c = root.square()
    scaled = beta2 * c
    weight = -scaled * B - scaled**2 * gamma * B / c + scaled**2 * B**2 * (q / c) / 2  # times c
    S_inv.mul_(1 + beta2 * gamma + (beta2 * gamma) ** 2 / 2)
    v = v / root.squeeze(-1)
    S_inv.add_(weight * v.unsqueeze(-1) * v.unsqueeze(-2))
    _symmetrise_(S_inv)


def if_covariance_(S_inv: Tensor, H: Tensor, *, beta2: Tensor, gamma: float) -> None:
    """Rule 4 for any H, with β₂ (b, 1, 1).  Changes S_inv.

      S⁻¹ <- (1+β₂γ)S⁻¹ - β₂S⁻¹HS⁻¹ + β₂²/2·W,   W = S⁻¹HS⁻¹HS⁻¹ - 2γS⁻¹HS⁻¹ + γ²S⁻¹

    With S⁻¹ = AAᵀ and N = AᵀHA - γI the result is ½A[I + (I-β₂N)(I-β₂N)ᵀ]Aᵀ: positive definite
    for any β₂.
    """
    c = power_of_two((S_inv * H).sum((1, 2), keepdim=True).clamp(min=1.0))
    H, scaled = H / c, beta2 * c
    P = S_inv @ H @ S_inv  # S⁻¹HS⁻¹/c
    Q = P @ H @ S_inv  # S⁻¹HS⁻¹HS⁻¹/c²
    S_inv.mul_(1 + beta2 * gamma + (beta2 * gamma) ** 2 / 2)
    S_inv.sub_((scaled + scaled**2 * gamma / c) * P).add_(scaled**2 / 2 * Q)
    # The products are symmetric only up to rounding; left alone, the difference would grow.
    S_inv.copy_((S_inv + S_inv.mT) / 2)


def apply(S_inv: Tensor, g: Tensor) -> Tensor:
    """U = S⁻¹g."""
    return torch.matmul(S_inv, g.unsqueeze(-1)).squeeze(-1)


def unit_gradient(g: Tensor, *, B: int) -> tuple[Tensor, Tensor]:
    """(g/u, B·u²) with a power of two u (b, 1, 1) about as large as the largest entry of g."""
    unit = power_of_two(g.abs().amax(-1).clamp(min=torch.finfo(g.dtype).tiny))
    # Curvature beyond the limit is as good as infinite: the step of the preconditioner is bounded.
    largest = torch.finfo(g.dtype).max ** 0.45
    weight = (B * unit).clamp(max=largest) * unit.clamp(max=largest)
    return g / unit[:, None], weight.clamp(max=largest)[:, None, None]


def limit_(S_inv: Tensor) -> None:
    """S⁻¹ <- D S⁻¹ D with a diagonal D <= I that brings its diagonal below the limit."""
    diagonal = S_inv.diagonal(dim1=-2, dim2=-1)
    scale = (LARGEST_INVERSE / diagonal).clamp(max=1.0).sqrt()
    S_inv.mul_(scale.unsqueeze(-1)).mul_(scale.unsqueeze(-2))


def _symmetrise_(S_inv: Tensor) -> None:
    """Bring S⁻¹ᵢⱼ and S⁻¹ⱼᵢ together where they differ by more than rounding.

    Rounding makes them differ, and with γ > 0 nothing holds the difference: it would grow with each
    step until S⁻¹ is no longer positive definite.
    """
    root = S_inv.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    rounding = 64 * torch.finfo(S_inv.dtype).eps * root.unsqueeze(-1) * root.unsqueeze(-2)
    apart = (S_inv - S_inv.mT).abs() > rounding
    S_inv.copy_(torch.where(apart, (S_inv + S_inv.mT) / 2, S_inv))
