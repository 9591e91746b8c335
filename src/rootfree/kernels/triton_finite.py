"""Checks in one pass whether all numbers of a list of tensors are finite.

A program checks one chunk of one tensor. `items` (two int32 each) say which tensor and which chunk;
`addresses` holds the addresses of the tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootfree.kernels.triton_shared import load_pointer

_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def finite_kernel(
    items, sizes, addresses, flag,
    G: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """flag <- 1 if a number is not finite; otherwise it is left alone."""
    which = tl.load(items + 2 * tl.program_id(0))
    start = tl.load(items + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(sizes + which)
    g_at = load_pointer(addresses, which, G, ALIGNED)
    strange = tl.zeros((BLOCK,), tl.int32)
    for offset in tl.static_range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        g = tl.load(g_at + at, at < size, 0.0).to(tl.float32)
        strange = tl.where(tl.abs(g) <= _LARGEST, strange, 1)  # comparisons with NaN are false
    if tl.max(strange, 0) != 0:  # no race: every program that writes writes the same
        tl.store(flag, 1.0)
