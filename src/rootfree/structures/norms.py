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
    has 1 as its largest entry, so that products of it fit every dtype.
    """
    wide = wide_dtype(M.dtype)
    # Not zero: nothing is divided by zero.
    largest = M.abs().flatten(-2).amax(-1).to(wide).clamp(min=torch.finfo(wide).tiny)
    unit = (M.to(wide) / largest[..., None, None]).to(dtype)
    gram = unit @ unit.mT if M.shape[-2] <= M.shape[-1] else unit.mT @ unit  # eigenvalues σ²
    # The largest entry of a positive semi-definite matrix is on its diagonal.
    top = gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=torch.finfo(dtype).tiny)
    gram = gram / top[..., None, None]
    eighth = sum_of_squares((gram @ gram).flatten(-2), dim=-1)  # Σσ⁸ / top⁴
    return largest * (top.to(wide).sqrt() * eighth.to(wide).pow(0.125)) * SLACK
