"""Inverse-free factors, dense: the equations of rules/if_shampoo.py in a few launches.

Layout: b blocks of d×d matrices. K: the factor (fp32, or bf16 rounded stochastically); `half`: its
bf16 copy that the matrix units read; h: its tangent vector; X (b, d, r): Ĝ₍ₙ₎ seen through strides.

Symmetric results are computed for the tiles on and below the diagonal and mirrored: half the work.
Sums over a block are left as one partial sum a tile and added up, always in the same order, by the
kernels that need them: no atomics, so that a run can be repeated bit for bit.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from rootfree.kernels.triton_rounding import round_stochastically

# Ĝ up to this is squared as it is; beyond, it is scaled down first (see `scale_down_kernel`).
_LARGE = tl.constexpr(1e6)
# Curvature beyond this is as good as infinite, as in curvature/outer_product.py.
_LARGEST = tl.constexpr(1e15)

# Triton's interpreter multiplies the bits of bf16 matrices; widened to fp32 the products are exact.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _multiply_add(left, right, acc):
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc)
    return tl.dot(left, right, acc)


@triton.jit
def _sum(partials, b, count):
    total = tl.zeros((), partials.dtype.element_ty)
    for start in range(0, count, 128):
        at = start + tl.arange(0, 128)
        total += tl.sum(tl.load(partials + b * count + at, at < count, 0.0), 0)
    return total


@triton.jit
def _unit(largest, b, count):
    """1, or the power of two that Ĝ of block b is divided by."""
    top = tl.zeros((), tl.float32)
    for start in range(0, count, 128):
        at = start + tl.arange(0, 128)
        top = tl.maximum(top, tl.max(tl.load(largest + b * count + at, at < count, 0.0), 0))
    return tl.where(top > _LARGE, tl.exp2(tl.ceil(tl.log2(top))), 1.0)


@triton.jit
def _root(x):
    """Root of a float64, whose range the squares of fp32 need, as fp32."""
    return tl.sqrt(x).to(tl.float32)


@triton.jit
def _tile(t):
    """Row and column of tile t among those on and below the diagonal."""
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    return i, t - i * (i + 1) // 2


@triton.jit
def _gram_tile(
    acc, x, rows, cols, d, r, x_d, x_r, DEPTH: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """acc + a tile of X Xᵀ, X given by its strides."""
    depth = tl.arange(0, DEPTH)
    left_at = x + rows[:, None] * x_d + depth[None, :] * x_r
    right_at = x + depth[:, None] * x_r + cols[None, :] * x_d
    for start in range(0, r, DEPTH):
        if EVEN:
            left = tl.load(left_at)
            right = tl.load(right_at)
        else:
            inside = start + depth < r
            left = tl.load(left_at, (rows < d)[:, None] & inside[None, :], 0.0)
            right = tl.load(right_at, inside[:, None] & (cols < d)[None, :], 0.0)
        acc = _multiply_add(left, right, acc)
        left_at += DEPTH * x_r
        right_at += DEPTH * x_r
    return acc


@triton.jit
def _store_mirrored(out, tile, i, j, rows, cols, d):
    value = tile.to(out.dtype.element_ty)
    inside = (rows < d)[:, None] & (cols < d)[None, :]
    tl.store(out + rows[:, None] * d + cols[None, :], value, inside)
    if i != j:
        inside = (cols < d)[:, None] & (rows < d)[None, :]
        tl.store(out + cols[:, None] * d + rows[None, :], tl.trans(value), inside)


@triton.jit
def start_kernel(squares, started, scales, count, elements, B, AXES: tl.constexpr):
    """scale <- (B·mean(G²))^{-1/(2N)} for a block that meets its first gradient, 1 for others."""
    b = tl.program_id(0)
    rms = _root(_sum(squares, b, count) / elements)
    fresh = (tl.load(started + b) == 0) & (rms > 0) & (rms < float("inf"))
    # At most 10¹⁵ for the product of the factors, as in rules/if_shampoo.py.
    scale = tl.exp2(-1.0 / AXES * tl.log2(tl.maximum(tl.sqrt(B) * rms, 1e-15)))
    tl.store(scales + b, tl.where(fresh, scale, 1.0))
    if fresh:
        tl.store(started + b, tl.full((), 1, started.dtype.element_ty))


@triton.jit
def halve_kernel(K, half, traces, scales, size, chunks, START: tl.constexpr, BLOCK: tl.constexpr):
    """K <- K·scale in blocks that start;  half <- K in bf16;  partial sums of K²."""
    b = tl.program_id(0) // chunks
    at = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    base = b.to(tl.int64) * size
    x = tl.load(K + base + at, mask, 0.0).to(tl.float32)
    if START:
        scale = tl.load(scales + b)
        if scale != 1:
            x = x * scale
            tl.store(K + base + at, x.to(K.dtype.element_ty), mask)
    tl.store(traces + tl.program_id(0), tl.sum(x * x, 0))
    tl.store(half + base + at, x.to(half.dtype.element_ty), mask)


@triton.jit
def largest_kernel(Ghat, largest, size, chunks, BLOCK: tl.constexpr):
    """Partial maxima of |Ĝ|."""
    b = (tl.program_id(0) // chunks).to(tl.int64)
    at = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(Ghat + b * size + at, at < size, 0.0).to(tl.float32)
    tl.store(largest + tl.program_id(0), tl.max(tl.abs(x), 0))


@triton.jit
def scale_down_kernel(Ghat, largest, size, chunks, BLOCK: tl.constexpr):
    """Ĝ <- Ĝ/unit in blocks whose squares would come near the end of the range."""
    b = tl.program_id(0) // chunks
    unit = _unit(largest, b, chunks)
    if unit > 1:
        at = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
        where = Ghat + b.to(tl.int64) * size + at
        x = tl.load(where, at < size, 0.0).to(tl.float32)
        tl.store(where, (x / unit).to(Ghat.dtype.element_ty), at < size)


@triton.jit
def tangent_kernel(
    X, half, gram, h, sums, largest, trace, other_trace,
    d, r, x_b, x_d, x_r, tiles, largest_count, trace_count, other_count, weight, lam, gamma,
    GRAM: tl.constexpr, OTHERS: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """h <- ½(weight·unit²·X Xᵀ + λ·∏ trace·KᵀK - γI), and partial sums of h²."""
    b = tl.program_id(0) // tiles
    t = tl.program_id(0) % tiles
    i, j = _tile(t)
    rows = i * TILE + tl.arange(0, TILE)
    cols = j * TILE + tl.arange(0, TILE)
    base = b.to(tl.int64) * d * d
    unit = _unit(largest, b, largest_count)
    # √weight first: the square of a large unit would overflow on its own.
    scaled = tl.sqrt(weight) * tl.minimum(unit, 1e17)
    scaled = tl.minimum(scaled * scaled, _LARGEST) * 0.5
    traces = _sum(trace, b, trace_count)
    if OTHERS == 2:
        traces *= _sum(other_trace, b, other_count)
    damping = tl.maximum(
        0.5 * lam * traces, 1e-25 * scaled
    )  # below rounding; the quotient is finite
    if GRAM:
        inside = (rows < d)[:, None] & (cols < d)[None, :]
        value = tl.load(gram + base + rows[:, None] * d + cols[None, :], inside, 0.0).to(tl.float32)
    else:
        value = tl.zeros((TILE, TILE), tl.float32)
        value = _gram_tile(value, X + b.to(tl.int64) * x_b, rows, cols, d, r, x_d, x_r, DEPTH, EVEN)
    # One accumulator for both sums leaves registers for a second program on the processor.
    value = value * (scaled / damping)
    value = _gram_tile(value, half + base, rows, cols, d, d, 1, d, DEPTH, EVEN) * damping
    diagonal = (rows[:, None] == cols[None, :]) & (rows < d)[:, None]
    value = tl.where(diagonal, value - 0.5 * gamma, value)
    _store_mirrored(h + base, value, i, j, rows, cols, d)
    total = tl.sum(tl.sum(value * value, 1), 0)
    tl.store(sums + b * tiles + t, tl.where(i == j, total, 2 * total))


@triton.jit
def square_kernel(
    h, q, sums, fourths, d, tiles,
    STORE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """STORE: q <- h²/‖h‖².  Otherwise partial sums of the squares of h²  (h is q then)."""
    b = tl.program_id(0) // tiles
    t = tl.program_id(0) % tiles
    i, j = _tile(t)
    rows = i * TILE + tl.arange(0, TILE)
    cols = j * TILE + tl.arange(0, TILE)
    base = b.to(tl.int64) * d * d
    value = tl.zeros((TILE, TILE), tl.float32)
    value = _gram_tile(value, h + base, rows, cols, d, d, d, 1, DEPTH, EVEN)
    if STORE:
        value = value / tl.maximum(_sum(sums, b, tiles), 1e-30)
        _store_mirrored(q + base, value, i, j, rows, cols, d)
    else:
        total = tl.sum(tl.sum(value * value, 1), 0)
        tl.store(fourths + b * tiles + t, tl.where(i == j, total, 2 * total))


@triton.jit
def product_kernel(half, P, d, tiles, TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """P <- K Kᵀ."""
    b = tl.program_id(0) // tiles
    i, j = _tile(tl.program_id(0) % tiles)
    rows = i * TILE + tl.arange(0, TILE)
    cols = j * TILE + tl.arange(0, TILE)
    base = b.to(tl.int64) * d * d
    value = tl.zeros((TILE, TILE), tl.float32)
    value = _gram_tile(value, half + base, rows, cols, d, d, d, 1, DEPTH, EVEN)
    _store_mirrored(P + base, value, i, j, rows, cols, d)


@triton.jit
def move_kernel(
    K, moved, sums, fourths, started, counters, size, chunks, tiles, axis, beta2, slack,
    NORM: tl.constexpr, START: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """K <- K - β₂/max(1, ‖h‖)·K h;  `moved` holds K h, and then the new K in bf16."""
    b = tl.program_id(0) // chunks
    at = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    base = b.to(tl.int64) * size
    x = tl.load(K + base + at, mask, 0.0).to(tl.float32)
    product = tl.load(moved + base + at, mask, 0.0).to(tl.float32)
    norm = tl.zeros((), tl.float32) + 1.0
    if NORM != "none":
        norm = tl.sqrt(_sum(sums, b, tiles))
    if NORM == "spectral":  # (Σσ⁸)^⅛ >= ‖h‖₂
        norm = norm * tl.sqrt(tl.sqrt(tl.sqrt(_sum(fourths, b, tiles)))) * slack
    step = beta2 / tl.maximum(norm, 1.0)
    if START:  # blocks that wait for their first gradient do not move
        step = tl.where(tl.load(started + b) == 0, 0.0, step)
    x = x - step * product
    if K.dtype.element_ty == tl.bfloat16:
        rounded = round_stochastically(x, at, tl.load(counters + b) + axis)
        tl.store(K + base + at, rounded, mask)
        tl.store(moved + base + at, rounded, mask)
    else:
        tl.store(K + base + at, x, mask)
        tl.store(moved + base + at, x.to(moved.dtype.element_ty), mask)


@triton.jit
def narrow_multiply_kernel(
    X, M, out, rows, d, tiles, m_row, m_col, ROWS: tl.constexpr, D: tl.constexpr
):
    """out <- X M for X (b, rows, d) with a narrow last axis."""
    b = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, D)
    square = (k < d)[:, None] & (k < d)[None, :]
    m = tl.load(M + b * d * d + k[:, None] * m_row + k[None, :] * m_col, square, 0.0)
    at = b * rows * d + row[:, None] * d + k[None, :]
    mask = (row < rows)[:, None] & (k < d)[None, :]
    x = tl.load(X + at, mask, 0.0)
    product = _multiply_add(x, m, tl.zeros((ROWS, D), tl.float32))
    tl.store(out + at, product.to(out.dtype.element_ty), mask)


@triton.jit
def narrow_gram_kernel(X, sums, rows, d, parts, ROWS: tl.constexpr, D: tl.constexpr):
    """Partial sums of XᵀX for X (b, rows, d) with a narrow last axis, one a part of the rows."""
    b = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    share = tl.cdiv(tl.cdiv(rows, parts), ROWS) * ROWS
    k = tl.arange(0, D)
    acc = tl.zeros((D, D), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (k < d)[None, :]
        x = tl.load(X + b * rows * d + row[:, None] * d + k[None, :], mask, 0.0)
        acc = _multiply_add(tl.trans(x), x, acc)
    square = (k < d)[:, None] & (k < d)[None, :]
    out = sums + tl.program_id(0).to(tl.int64) * d * d
    tl.store(out + k[:, None] * d + k[None, :], acc, square)


@triton.jit
def vector_kernel(
    G, K, started, counters, size, B, beta2, lam, gamma,
    REFRESH: tl.constexpr, START: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One axis with a diagonal factor k: h = ½(B(kg)² + λk² - γ), k <- k(1 - β₂h/‖h‖), g <- k²g."""
    b = tl.program_id(0)
    g_at = G + b.to(tl.int64) * size
    k_at = K + b.to(tl.int64) * size
    scale = tl.zeros((), tl.float32) + 1.0
    step = tl.zeros((), tl.float32)
    if REFRESH:
        waits = scale < 0
        if START:
            total = tl.zeros((), tl.float64)
            for begin in range(0, size, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                g = tl.load(g_at + at, at < size, 0.0).to(tl.float64)
                total += tl.sum(g * g, 0)
            rms = _root(total / size)
            known = tl.load(started + b) != 0
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
    return 0.5 * (tl.minimum(root * root, _LARGEST) + lam * k * k - gamma)
