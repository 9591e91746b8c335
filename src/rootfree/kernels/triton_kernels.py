"""The only module through which kernels are reached: importing it needs Triton."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from rootfree.kernels import triton_blocks as blocks
from rootfree.kernels import triton_diagonal as diagonal
from rootfree.kernels import triton_factors as factors
from rootfree.kernels import triton_finite as finite
from rootfree.kernels import triton_products as products
from rootfree.kernels import triton_vectors as vectors

_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,  # for state only: kernels compute in fp32
}

__all__ = ["blocks", "diagonal", "dtype", "factors", "finite", "products", "vectors"]


def dtype(tensor: Tensor) -> tl.dtype:
    """Triton's name for the dtype of a tensor."""
    return _DTYPES[tensor.dtype]
