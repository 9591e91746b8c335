"""What other programs left behind about a block: partial sums and maxima, added up in one order.

No atomics, so that a run can be repeated bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootfree.curvature import outer_product

# Ĝ up to this is squared as it is; beyond, it is scaled down first (see `scale_down_kernel`): the
# squares are multiplied by up to 10²⁵ (see `tangent_kernel`).
LARGE = tl.constexpr(1e3)
LARGEST = tl.constexpr(outer_product.LARGEST)


@triton.jit
def add_up(partials, b, count):
    """The sum of the `count` partial sums of block b."""
    total = tl.zeros((), partials.dtype.element_ty)
    for start in range(0, count, 128):
        at = start + tl.arange(0, 128)
        total += tl.sum(tl.load(partials + b * count + at, at < count, 0.0), 0)
    return total


@triton.jit
def unit_of(largest, b, count):
    """1, or the power of two that Ĝ of block b is divided by."""
    top = tl.zeros((), tl.float32)
    for start in range(0, count, 128):
        at = start + tl.arange(0, 128)
        top = tl.maximum(top, tl.max(tl.load(largest + b * count + at, at < count, 0.0), 0))
    return tl.where(top > LARGE, tl.exp2(tl.ceil(tl.log2(top))), 1.0)


@triton.jit
def root_of(x):
    """Root of a float64, whose range the squares of fp32 need, as fp32."""
    return tl.sqrt(x).to(tl.float32)
