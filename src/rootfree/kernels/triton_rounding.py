"""Numbers in fewer bits inside Triton kernels: bit for bit as in rounding.py and halves.py."""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B1)
_MIX = tl.constexpr(0x85EBCA6B)


@triton.jit
def round_stochastically(x, index, counter):
    """fp32 `x` up or down to a bf16 number; the noise is a hash of (index, counter)."""
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
    """fp32 `x` as its bf16 neighbour, and the rest of its bits (int16)."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    upper = (bits + 0x8000) >> 16
    lower = (bits - (upper << 16)).to(tl.int16)
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True), lower


@triton.jit
def join(upper, lower):
    """The fp32 number that `split` made these of."""
    bits = upper.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (bits + lower.to(tl.int32)).to(tl.float32, bitcast=True)
