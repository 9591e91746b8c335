"""Stochastic rounding inside Triton kernels: bit for bit the noise of rootfree/rounding.py."""

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
