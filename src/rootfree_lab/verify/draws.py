"""Random numbers and matrices for claims."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mixing(generator: torch.Generator, *shape: int) -> Tensor:
    """Square matrices (..., d, d) that are far from symmetric, with singular values from ½ to 2.

    Bounded conditioning: rounding, and with it the bars, does not depend on the draw.
    """
    values = torch.logspace(-1, 1, shape[-1], base=2, dtype=torch.float64)
    left, right = rotation(generator, *shape), rotation(generator, *shape)
    return left @ values.diag() @ right


def rotation(generator: torch.Generator, *shape: int) -> Tensor:
    """Random orthogonal matrices (..., d, d)."""
    Q: Tensor = torch.linalg.qr(normal(generator, *shape)).Q
    return Q
