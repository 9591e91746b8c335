"""Inverse-free factors: the kernels that go over their elements (rules/if_shampoo.py).

`numbers` (fp32): B, β₂, λ and γ in places 5 to 8.

Layout: b blocks of d×d matrices. K: the factor in bf16, and either its `lower` half, which makes it
fp32 (see halves.py), or stochastic rounding. Those that multiply matrices are in
triton_products.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootfree.kernels.triton_shared import (
    LARGEST,
    add_up,
    join,
    root_of,
    round_stochastically,
    split,
    unit_of,
)


@triton.jit
def _chunk(size, chunks, BLOCK: tl.constexpr):
    """This program's block, elements of it, which of them there are, and where the block begins."""
    b = tl.program_id(0) // chunks
    at = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    return b, at, at < size, b.to(tl.int64) * size


@triton.jit(do_not_specialize=["count", "elements"], do_not_specialize_on_alignment=["squares"])
def start_kernel(squares, started, scales, numbers, count, elements, AXES: tl.constexpr):
    """scale <- (B·mean(G²))^{-1/(2N)} for a block that meets its first gradient, 1 for others."""
    b = tl.program_id(0)
    rms = root_of(add_up(squares, b, count) / elements)
    fresh = (tl.load(started + b) == 0) & (rms > 0) & (rms < float("inf"))
    B = tl.load(numbers + 5)
    # At most 10¹⁵ for the product of the factors, as in rules/if_shampoo.py.
    scale = tl.exp2(-1.0 / AXES * tl.log2(tl.maximum(tl.sqrt(B) * rms, 1e-15)))
    tl.store(scales + b, tl.where(fresh, scale, 1.0))
    if fresh:
        tl.store(started + b, tl.full((), 1, started.dtype.element_ty))


@triton.jit(do_not_specialize=["chunks"])
def trace_kernel(
    K, lower, traces, scales, size, chunks,
    START: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """K <- K·scale in blocks that start;  partial sums of K²."""
    b, at, mask, base = _chunk(size, chunks, BLOCK)
    k = tl.load(K + base + at, mask, 0.0)
    if START:
        scale = tl.load(scales + b)
        if scale != 1:
            if HALVES:
                x = join(k, tl.load(lower + base + at, mask, 0)) * scale
                k, left = split(x)
                tl.store(lower + base + at, left, mask)
            else:
                k = (k.to(tl.float32) * scale).to(tl.bfloat16)
            tl.store(K + base + at, k, mask)
    x = k.to(tl.float32)
    tl.store(traces + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit(do_not_specialize=["chunks"])
def largest_kernel(Ghat, largest, size, chunks, BLOCK: tl.constexpr):
    """Partial maxima of |Ĝ|."""
    _, at, mask, base = _chunk(size, chunks, BLOCK)
    x = tl.load(Ghat + base + at, mask, 0.0).to(tl.float32)
    tl.store(largest + tl.program_id(0), tl.max(tl.abs(x), 0))


@triton.jit(do_not_specialize=["chunks"])
def scale_down_kernel(Ghat, largest, size, chunks, BLOCK: tl.constexpr):
    """Ĝ <- Ĝ/unit in blocks whose squares would come near the end of the range."""
    b, at, mask, base = _chunk(size, chunks, BLOCK)
    unit = unit_of(largest, b, chunks)
    if unit > 1:
        x = tl.load(Ghat + base + at, mask, 0.0).to(tl.float32)
        tl.store(Ghat + base + at, (x / unit).to(Ghat.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["chunks", "tiles", "axis"])
def move_kernel(
    K, lower, product, sums, fourths, started, counters, numbers,
    size, chunks, tiles, axis, slack,
    NORM: tl.constexpr, START: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """K <- K - β₂/max(1, ‖h‖)·K h;  `product` holds K h."""
    b, at, mask, base = _chunk(size, chunks, BLOCK)
    k = tl.load(K + base + at, mask, 0.0)
    moved = tl.load(product + base + at, mask, 0.0).to(tl.float32)
    norm = tl.zeros((), tl.float32) + 1.0
    if NORM != "none":
        norm = tl.sqrt(add_up(sums, b, tiles))
    if NORM == "spectral":  # (Σσ⁸)^⅛ >= ‖h‖₂
        norm = norm * tl.sqrt(tl.sqrt(tl.sqrt(add_up(fourths, b, tiles)))) * slack
    step = tl.load(numbers + 6) / tl.maximum(norm, 1.0)
    if START:  # blocks that wait for their first gradient do not move
        step = tl.where(tl.load(started + b) == 0, 0.0, step)
    if HALVES:
        x = join(k, tl.load(lower + base + at, mask, 0))
        k, left = split(x - step * moved)
        tl.store(lower + base + at, left, mask)
    else:
        x = k.to(tl.float32) - step * moved
        k = round_stochastically(x, at, tl.load(counters + b) + axis)
    tl.store(K + base + at, k, mask)


@triton.jit(do_not_specialize=["size"])
def vector_kernel(
    G, K, started, counters, numbers, size,
    REFRESH: tl.constexpr, START: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One axis with a diagonal factor k: h = ½(B(kg)² + λk² - γ), k <- k(1 - β₂h/‖h‖), g <- k²g."""
    B = tl.load(numbers + 5)
    beta2 = tl.load(numbers + 6)
    lam = tl.load(numbers + 7)
    gamma = tl.load(numbers + 8)
    b = tl.program_id(0)
    g_at = G + b.to(tl.int64) * size
    k_at = K + b.to(tl.int64) * size
    scale = tl.zeros((), tl.float32) + 1.0
    step = tl.zeros((), tl.float32)
    if REFRESH:
        waits = scale < 0
        if START:
            # Read before the sum, which all warps wait for: it is written below.
            known = tl.load(started + b) != 0
            total = tl.zeros((), tl.float64)
            for begin in range(0, size, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                g = tl.load(g_at + at, at < size, 0.0).to(tl.float64)
                total += tl.sum(g * g, 0)
            rms = root_of(total / size)
            finite = (rms > 0) & (rms < float("inf"))
            if (known == 0) & finite:
                scale = 1 / tl.maximum(tl.sqrt(B) * rms, 1e-15)
                tl.store(started + b, tl.full((), 1, started.dtype.element_ty))
            waits = (known == 0) & (finite == 0)
        norm = tl.zeros((), tl.float32)
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            g = tl.load(g_at + at, at < size, 0.0).to(tl.float32)
            k = tl.load(k_at + at, at < size, 0.0).to(tl.float32) * scale
            h = _vector_tangent(g, k, B, lam, gamma)
            h = tl.where(at < size, h, 0.0)
            if NORM == "frobenius":
                norm += tl.sum(h * h, 0)
            else:
                norm = tl.maximum(norm, tl.max(tl.abs(h), 0))
        if NORM == "frobenius":
            norm = tl.sqrt(norm)
        if NORM == "none":
            norm = tl.zeros((), tl.float32)
        step = tl.where(waits, 0.0, beta2 / tl.maximum(norm, 1.0))
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = at < size
        g = tl.load(g_at + at, mask, 0.0).to(tl.float32)
        k = tl.load(k_at + at, mask, 0.0).to(tl.float32)
        if REFRESH:
            k = k * scale
            k = k * (1 - step * _vector_tangent(g, k, B, lam, gamma))
            if K.dtype.element_ty == tl.bfloat16:
                rounded = round_stochastically(k, at, tl.load(counters + b))
                tl.store(k_at + at, rounded, mask)
                k = rounded.to(tl.float32)
            else:
                tl.store(k_at + at, k, mask)
        tl.store(g_at + at, (k * (k * g)).to(G.dtype.element_ty), mask)


@triton.jit
def _vector_tangent(g, k, B, lam, gamma):
    root = tl.minimum(tl.abs(k * g), 1e15) * tl.sqrt(B)
    return 0.5 * (tl.minimum(root * root, LARGEST) + lam * k * k - gamma)
