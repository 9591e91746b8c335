"""Functions that Triton kernels share: pointers from tables, rounding, halves, sums over a block.

Rounding and halves agree bit for bit with rounding.py and halves.py. Partial sums of other programs
are added in a fixed order, without atomics, so that runs are reproducible bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootfree import rules
from rootfree.curvature import outer_products
from rootfree.kernels import tables
from rootfree.rules import if_whitening

_GOLDEN = tl.constexpr(0x9E3779B1)
_MIX = tl.constexpr(0x85EBCA6B)
# A larger Ĝ is scaled down before it is squared (see `scale_down_kernel`), because the squares are
# multiplied by up to 10²⁵ (see `tangent_kernel`).
LARGE = tl.constexpr(1e3)
LARGEST = tl.constexpr(outer_products.LARGEST)
LARGEST_GRADIENT = tl.constexpr(rules.LARGEST_GRADIENT)
LEAST = tl.constexpr(rules.LEAST_DAMPING)
LARGEST_DAMPING = tl.constexpr(if_whitening.LARGEST_DAMPING)
SLOWLY = tl.constexpr(if_whitening.SLOWLY)
MOST = tl.constexpr(if_whitening.MOST)
SKIP = tl.constexpr(tables.SKIP)


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
    """The power of two by which Ĝ of block b is divided, often 1."""
    top = tl.zeros((), tl.float32)
    for start in range(0, count, 128):
        at = start + tl.arange(0, 128)
        top = tl.maximum(top, tl.max(tl.load(largest + b * count + at, at < count, 0.0), 0))
    return tl.where(top > LARGE, tl.exp2(tl.ceil(tl.log2(top))), 1.0)


@triton.jit
def root_of(x):
    """√x in fp32, for x in float64, whose range squares of fp32 numbers need."""
    return tl.sqrt(x).to(tl.float32)


@triton.jit
def clipped(u, c):
    """u with elements limited to [-c, c]; a NaN stays NaN."""
    return tl.where(u > c, c, tl.where(u < -c, -c, u))


@triton.jit
def load_pointer(addresses, index, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer at an index of an address table."""
    pointer = tl.load(addresses + index).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def store_state(pointer, offsets, mask, x, index, counter):
    """Store fp32 `x`, rounded stochastically if the state is in bf16."""
    if pointer.dtype.element_ty == tl.bfloat16:
        tl.store(pointer + offsets, round_stochastically(x, index, counter), mask)
    else:
        tl.store(pointer + offsets, x, mask)


@triton.jit
def round_stochastically(x, index, counter):
    """fp32 `x` rounded up or down to bf16; the noise is a hash of (index, counter)."""
    golden = tl.full(index.shape, _GOLDEN, tl.uint32)
    mix = tl.full(index.shape, _MIX, tl.uint32)
    h = index.to(tl.uint32) * golden + counter.to(tl.uint32) * mix
    h = (h ^ (h >> 15)) * mix
    h = (h ^ (h >> 13)) * golden
    bits = x.to(tl.uint32, bitcast=True) + (h >> 16)
    rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    # The bits of a NaN plus noise may carry out of the exponent and look like zero or infinity.
    return tl.where(x != x, x, rounded).to(tl.bfloat16)


@triton.jit
def split(x):
    """The upper (bf16) and lower (int16) halves of fp32 `x`."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    upper = (bits + 0x8000) >> 16
    lower = (bits - (upper << 16)).to(tl.int16)
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True), lower


@triton.jit
def join(upper, lower):
    """The fp32 number with these halves: the inverse of `split`."""
    bits = upper.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (bits + lower.to(tl.int32)).to(tl.float32, bitcast=True)
