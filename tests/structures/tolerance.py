"""How far a result may be from float64, by dtype and depth."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_near(actual: Tensor, expected: Tensor, *, terms: int, magnitude: Tensor) -> None:
    """|actual - expected| <= magnitude·(4 eps + terms·eps of the accumulator), at every entry.

    `magnitude` bounds Σ|terms| of the sums behind the result, and its largest entry is used: an FFT
    spreads its error over the whole result. On the way at most four roundings to the dtype occur
    (two partial results, their sum, the result); inside a sum of n terms the accumulator, fp32 for
    the half types, rounds n times.
    """
    eps = torch.finfo(actual.dtype).eps
    accumulator_eps = min(eps, torch.finfo(torch.float32).eps)
    bound = float(magnitude.max()) * (4 * eps + terms * accumulator_eps)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)
