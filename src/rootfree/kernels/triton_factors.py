"""Dense inverse-free factors: the elementwise kernels (rules/if_shampoo.py, rules/if_whitening.py).

The kernels that multiply matrices are in triton_products.py.

`numbers` (fp32): B, β₂, λ and γ in places 5 to 8; place 11 forbids changes if it is not 0.

Layout: b blocks of d×d matrices. K is the factor in bf16. Either it is rounded stochastically, or
its `lower` half makes it an fp32 factor (see halves.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootfree.kernels.triton_shared import (
    LARGEST_DAMPING,
    LEAST,
    MOST,
    SKIP,
    SLOWLY,
    add_up,
    join,
    root_of,
    round_stochastically,
    split,
    unit_of,
)


@triton.jit
def _chunk(size, chunks, BLOCK: tl.constexpr):
    """This program's block, its elements of it, the mask of those, and where the block begins."""
    b = tl.program_id(0) // chunks
    at = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    return b, at, at < size, b.to(tl.int64) * size


@triton.jit(do_not_specialize=["count", "elements"], do_not_specialize_on_alignment=["squares"])
def start_kernel(
    squares, started, scales, numbers, count, elements, AXES: tl.constexpr, GIVEN: tl.constexpr
):
    """scale <- (B·mean(G²))^{-1/(2N)} for a block with its first gradient, 1 for others.

    GIVEN: `squares` holds √(tr H/D), and the scale is its (-1/N)-th power.
    """
    b = tl.program_id(0)
    if GIVEN:
        root = tl.load(squares + b)
        rms = root
    else:
        rms = root_of(add_up(squares, b, count) / elements)
        root = tl.sqrt(tl.load(numbers + 5)) * rms
    fresh = (tl.load(started + b) == 0) & (rms > 0) & (rms < float("inf"))
    fresh = fresh & (tl.load(numbers + SKIP) == 0)
    # At most 10¹⁵ for the product of the factors, as in rules/if_shampoo.py.
    scale = tl.exp2(-1.0 / AXES * tl.log2(tl.maximum(root, 1e-15)))
    tl.store(scales + b, tl.where(fresh, scale, 1.0))
    if fresh:
        tl.store(started + b, tl.full((), 1, started.dtype.element_ty))


@triton.jit(do_not_specialize=["count", "elements"], do_not_specialize_on_alignment=["squares"])
def follow_kernel(
    squares, started, means, scales, lams, moves, numbers, count, elements, AXES: tl.constexpr
):  # fmt: skip
    """Whitening: v <- v + β₂/100(min(mean(G²), 1000v) - v), λ = ρv, the scale of a fresh block."""
    b = tl.program_id(0)
    rms = root_of(add_up(squares, b, count) / elements)
    has_gradient = (rms > 0) & (rms < float("inf")) & (tl.load(numbers + SKIP) == 0)
    fresh = (tl.load(started + b) == 0) & has_gradient
    scale = tl.exp2(-0.5 / AXES * tl.log2(tl.maximum(rms, 1e-15)))
    v = followed(tl.load(means + b), rms, tl.load(numbers + 6), has_gradient, fresh)
    tl.store(means + b, v)
    tl.store(lams + b, tl.load(numbers + 7) * v + LEAST)
    tl.store(scales + b, tl.where(fresh, scale, 1.0))
    tl.store(moves + b, has_gradient.to(moves.dtype.element_ty))
    if fresh:
        tl.store(started + b, tl.full((), 1, started.dtype.element_ty))


@triton.jit
def followed(v, rms, beta2, has_gradient, fresh):
    """The running mean of mean(G²), which starts at the first value that is not zero."""
    rms = tl.minimum(rms, 1e15)
    square = rms * rms
    limited = tl.where(v > 0, tl.minimum(square, MOST * v), square)
    moved = tl.where(fresh, square, v + SLOWLY * beta2 * (limited - v))
    return tl.where(has_gradient, moved, v)


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


@triton.jit
def _log_size(trace, b, count, d):
    """log₂ of the root mean square of the singular values of a factor."""
    mean = add_up(trace, b, count) / d
    return 0.5 * tl.log2(tl.minimum(tl.maximum(mean, 1.2e-38), 3.4e38))


@triton.jit
def _rounded(x):
    return tl.where(x < 0, -tl.floor(0.5 - x), tl.floor(x + 0.5))


@triton.jit(do_not_specialize=["n0", "n1", "n2", "d0", "d1", "d2"])
def balance_kernel(
    trace0, trace1, trace2, powers, lams, n0, n1, n2, d0, d1, d2,
    AXES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """powers (b, N) <- 2^eₙ as in rules/if_shampoo.py.

    Each block has nₙ partial sums of tr(KₙᵀKₙ). LIMIT limits λ of whitening, as in
    rules/if_whitening.py.
    """
    b = tl.program_id(0)
    size0 = _log_size(trace0, b, n0, d0)
    size1 = _log_size(trace1, b, n1, d1)
    mean = (size0 + size1) / AXES
    size2 = size0
    if AXES == 3:
        size2 = _log_size(trace2, b, n2, d2)
        mean += size2 / AXES
    if LIMIT:
        bound = tl.log2(tl.load(lams + b)) + 4 * AXES * mean
        bound += tl.log2(d0.to(tl.float32)) + tl.log2(d1.to(tl.float32))
        if AXES == 3:
            bound += tl.log2(d2.to(tl.float32))
        tl.store(lams + b, tl.load(lams + b) * tl.exp2(tl.minimum(LARGEST_DAMPING - bound, 0.0)))
    e0 = _rounded(mean - size0)
    e1 = _rounded(mean - size1)
    if AXES == 3:
        e2 = _rounded(mean - size2)
        excess = e0 + e1 + e2
        over0 = (e0 - mean + size0) * excess
        over1 = (e1 - mean + size1) * excess
        over2 = (e2 - mean + size2) * excess
        first = (over0 >= over1) & (over0 >= over2)
        second = (over1 >= over2) & (first == 0)
        e0 -= tl.where(first, excess, 0.0)
        e1 -= tl.where(second, excess, 0.0)
        e2 -= tl.where((first == 0) & (second == 0), excess, 0.0)
        tl.store(powers + b * AXES + 2, tl.exp2(e2))
    tl.store(powers + b * AXES, tl.exp2(e0))
    tl.store(powers + b * AXES + 1, tl.exp2(e1))


@triton.jit(do_not_specialize=["chunks"])
def largest_kernel(Ghat, largest, size, chunks, BLOCK: tl.constexpr):
    """Partial maxima of |Ĝ|."""
    _, at, mask, base = _chunk(size, chunks, BLOCK)
    x = tl.load(Ghat + base + at, mask, 0.0).to(tl.float32)
    tl.store(largest + tl.program_id(0), tl.max(tl.abs(x), 0))


@triton.jit(do_not_specialize=["chunks"])
def scale_down_kernel(Ghat, largest, size, chunks, BLOCK: tl.constexpr):
    """Ĝ <- Ĝ/unit in blocks whose squares might otherwise overflow."""
    b, at, mask, base = _chunk(size, chunks, BLOCK)
    unit = unit_of(largest, b, chunks)
    if unit > 1:
        x = tl.load(Ghat + base + at, mask, 0.0).to(tl.float32)
        tl.store(Ghat + base + at, (x / unit).to(Ghat.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["chunks", "tiles", "axes", "axis"])
def move_kernel(
    K, lower, product, sums, fourths, powers, started, counters, numbers,
    size, axes, chunks, tiles, axis, slack,
    NORM: tl.constexpr, START: tl.constexpr, HALVES: tl.constexpr, WHITEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """K <- 2^e·(K - β₂/max(1, ‖h‖)·K h);  `product` is K h, `powers` holds 2^e of every axis.

    WHITEN: K <- 2^e·(K - β₂/max(1, ‖2h‖)·h K);  `product` is h K.
    """
    if tl.load(numbers + SKIP) != 0:
        return
    b, at, mask, base = _chunk(size, chunks, BLOCK)
    k = tl.load(K + base + at, mask, 0.0)
    moved = tl.load(product + base + at, mask, 0.0).to(tl.float32)
    norm = tl.zeros((), tl.float32) + 1.0
    if NORM != "none":
        norm = tl.sqrt(add_up(sums, b, tiles))
    if NORM == "spectral":  # (Σσ⁸)^⅛ >= ‖h‖₂
        norm = norm * tl.sqrt(tl.sqrt(tl.sqrt(add_up(fourths, b, tiles)))) * slack
    if WHITEN and NORM != "none":
        norm = 2 * norm
    step = tl.load(numbers + 6) / tl.maximum(norm, 1.0)
    if START:  # blocks that wait for a gradient do not move
        step = tl.where(tl.load(started + b) == 0, 0.0, step)
    power = tl.load(powers + b * axes + axis)
    if HALVES:
        x = join(k, tl.load(lower + base + at, mask, 0))
        k, left = split(power * (x - step * moved))
        tl.store(lower + base + at, left, mask)
    else:
        x = power * (k.to(tl.float32) - step * moved)
        k = round_stochastically(x, at, tl.load(counters + b) + axis)
    tl.store(K + base + at, k, mask)
