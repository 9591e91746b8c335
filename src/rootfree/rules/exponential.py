"""The exact exponential that the inverse-free rule truncates: a reference, not a fast path."""

from __future__ import annotations

import torch
from torch import Tensor


def move_factor_exactly(K: Tensor, m: Tensor, *, beta2: float) -> Tensor:
    """K exp(-β₂ m) for dense K and m (b, d, d); K (I - β₂ m) is its first-order truncation."""
    moved: Tensor = K @ torch.linalg.matrix_exp(-beta2 * m)
    return moved
