"""How large a tangent vector is: what bounds the step of a factor.

K (I - β₂ m/max(1, ‖m‖)) keeps K invertible as long as β₂‖m‖₂ is below the norm that divides it.

Layout: m packed (b, *packed_shape), v (b, d); norms are (b,).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rootfree.structures import Dense, Diagonal, Structure

# The bound on β₂‖m‖₂/estimate that is kept whatever the estimate; the rest is room for rounding.
_MARGIN = 0.9
_POWER_STEPS = 2


def frobenius_norm(structure: Structure, m: Tensor) -> Tensor:
    """‖m‖_F of the dense matrix."""
    return structure.squared_norm(m).sqrt()


def spectral_norm_(
    structure: Structure, m: Tensor, v: Tensor, *, beta2: float, dtype: torch.dtype
) -> Tensor:
    """‖m‖₂, estimated by power iteration from v, the vector left by the last call.  Changes v.

    The estimate is never so low that β₂‖m‖₂/estimate reaches one, whatever v is: it is at least
    β₂/0.9 times an upper bound of ‖m‖₂. For dense m the bound is the Schatten-4 norm
    ‖mᵀm‖_F^½ <= d^¼‖m‖₂, which stays below the estimate for the usual β₂; for other structures
    it is the Frobenius norm.
    """
    if isinstance(structure, Diagonal):
        return m.abs().amax(1)
    size = frobenius_norm(structure, m).clamp(min=torch.finfo(torch.float32).tiny)
    # Of unit Frobenius norm, m and mᵀm fit every dtype.
    unit = (m / size.view(-1, *[1] * (m.dim() - 1))).to(dtype)
    square, bound = None, torch.ones_like(size)
    if isinstance(structure, Dense):
        square = unit.mT @ unit
        bound = structure.squared_norm(square).to(size.dtype).pow(0.25)
    x = v.to(dtype)
    length = torch.zeros_like(size)
    for _ in range(_POWER_STEPS):
        if square is not None:
            y = (square @ x.unsqueeze(2)).squeeze(2)
        else:
            x3 = structure.apply(unit, x.unsqueeze(2))
            y = structure.apply_transposed(unit, x3).squeeze(2)
        y = y.to(v.dtype)
        length = torch.linalg.vector_norm(y, dim=1)
        # Where v met only the null space, it stays as it is.
        moved = torch.where(length[:, None] > 0, y / length[:, None], v)
        v.copy_(moved)
        x = v.to(dtype)
    return size * torch.maximum(length.to(size.dtype).sqrt(), beta2 / _MARGIN * bound)
