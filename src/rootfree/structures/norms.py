"""Spectral norms from above, by matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from rootfree.structures.precision import sum_of_squares, wide_dtype

# A little more than the rounding of the products, so that it stays a bound in half precision.
SLACK = 1 + 2 * torch.finfo(torch.bfloat16).eps


def schatten8(M: Tensor, *, dtype: torch.dtype) -> Tensor:
    """(Σ σ⁸)^⅛ over the singular values of M (..., p, q): ‖M‖₂ <= it <= min(p, q)^⅛ ‖M‖₂.

    Two products in `dtype`, no iteration: a smooth function of M, so that trajectories that differ
    by rounding stay together (an estimate by power iteration drove them apart). What is multiplied
    has unit Frobenius norm and so fits every dtype.
    """
    wide = wide_dtype(M.dtype)
    size = _frobenius(M)
    unit = (M.to(wide) / size[..., None, None]).to(dtype)
    gram = unit @ unit.mT if M.shape[-2] <= M.shape[-1] else unit.mT @ unit  # eigenvalues σ²
    fourth = _root_sum_of_squares(gram)  # (Σσ⁴)^½
    gram = (gram.to(fourth.dtype) / fourth[..., None, None]).to(dtype)
    eighth = _root_sum_of_squares(gram @ gram)  # (Σσ⁸)^½ / Σσ⁴
    return size * (fourth.sqrt() * eighth.pow(0.25)).to(wide) * SLACK


def _frobenius(M: Tensor) -> Tensor:
    # Scaled first, and never below 1e-15: neither squares nor quotients leave the range of a dtype.
    largest = M.abs().flatten(-2).amax(-1).to(wide_dtype(M.dtype)).clamp(min=1e-15)
    scaled = M.to(largest.dtype) / largest[..., None, None]
    return largest * _root_sum_of_squares(scaled).clamp(min=1.0)


def _root_sum_of_squares(M: Tensor) -> Tensor:
    # Zero matrices: no division by zero.
    return sum_of_squares(M.flatten(-2), dim=-1).sqrt().clamp(min=1e-15)
