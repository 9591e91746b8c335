"""Dense inverse-free factors: the kernels that multiply matrices.

Layout: b blocks of d×d matrices. K is the factor in bf16, which the matrix units read; h is its
tangent vector; X (b, d, r) is Ĝ₍ₙ₎ as a strided view.

Symmetric results are computed in the tiles on and below the diagonal, then mirrored: half the work.
A sum over a block is left as one partial sum per tile (see triton_shared.py).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from rootfree.kernels.triton_shared import LARGEST, add_up, unit_of

# Triton's interpreter would multiply the bit patterns of bf16 numbers. Products in fp32 are exact.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _multiply_add(left, right, acc):
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc)
    return tl.dot(left, right, acc)


@triton.jit
def _tile(d, tiles, TILE: tl.constexpr):
    """This program's block, its tile on or below the diagonal, and where both are."""
    b = tl.program_id(0) // tiles
    t = tl.program_id(0) % tiles
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    rows = i * TILE + tl.arange(0, TILE)
    cols = j * TILE + tl.arange(0, TILE)
    return b, t, i, j, rows, cols, b.to(tl.int64) * d * d


@triton.jit
def _gram_tile(
    acc, x, rows, cols, d, r, x_d, x_r, DEPTH: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """acc + a tile of X Xᵀ, for X given by its strides."""
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


@triton.jit(
    do_not_specialize=["tiles", "largest_count", "trace_count", "other_count", "size", "columns"]
)
def tangent_kernel(
    X, K, gram, h, sums, largest, trace, other_trace, lams, numbers,
    d, r, x_b, x_d, x_r, tiles, largest_count, trace_count, other_count, size, columns,
    GRAM: tl.constexpr, GIVEN: tl.constexpr, OTHERS: tl.constexpr,
    ROW_MAJOR: tl.constexpr, OF_BLOCK: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """h <- ½(B·unit²/columns·X Xᵀ + λ·∏ trace·KᵀK - γI), and partial sums of h².

    λ is one of the numbers or, OF_BLOCK, in `lams`. GIVEN: the first term is the gram of each block
    times its number in `largest`. Without padding there are `size` of the d rows, and `columns` of
    the r columns.
    """
    if EIGHTS:  # Triton on its own reads eight numbers at once only at multiples of 16
        d = d // 8 * 8
        r = r // 8 * 8
        if ROW_MAJOR:
            x_d = x_d // 8 * 8
        else:
            x_r = x_r // 8 * 8
    b, t, i, j, rows, cols, base = _tile(d, tiles, TILE)
    lam = tl.load(lams + b) if OF_BLOCK else tl.load(numbers + 7)
    lam = lam / columns  # times ∏_{j≠n} tr(KⱼᵀKⱼ): λ ∏_{j≠n} tr(KⱼᵀKⱼ)/dⱼ
    gamma = tl.load(numbers + 8)
    traces = add_up(trace, b, trace_count)
    if OTHERS == 2:
        traces *= add_up(other_trace, b, other_count)
    value = tl.zeros((TILE, TILE), tl.float32)
    inside = (rows < d)[:, None] & (cols < d)[None, :]
    gram_at = gram + base + rows[:, None] * d + cols[None, :]
    if GIVEN:
        value = _gram_tile(value, K + base, rows, cols, d, d, 1, d, DEPTH, EVEN)
        value = value * (0.5 * lam * traces)
        value += tl.load(gram_at, inside, 0.0).to(tl.float32) * (0.5 * tl.load(largest + b))
    else:
        unit = unit_of(largest, b, largest_count)
        B = tl.load(numbers + 5)
        # The square of a large unit would overflow.
        scaled = tl.sqrt(B) * tl.minimum(unit, 1e17)
        scaled = tl.minimum(scaled * scaled, LARGEST) * 0.5 / columns
        # The lower limit is below rounding errors. It keeps the quotient below finite, and also the
        # quotient's product with a Gram matrix of numbers up to LARGE.
        damping = tl.maximum(0.5 * lam * traces, 1e-25 * scaled)
        if GRAM:
            value = tl.load(gram_at, inside, 0.0).to(tl.float32)
        else:
            x = X + b.to(tl.int64) * x_b
            value = _gram_tile(value, x, rows, cols, d, r, x_d, x_r, DEPTH, EVEN)
        # A single accumulator for both sums leaves registers for a second program per processor.
        value = value * (scaled / damping)
        value = _gram_tile(value, K + base, rows, cols, d, d, 1, d, DEPTH, EVEN) * damping
    diagonal = (rows[:, None] == cols[None, :]) & (rows < size)[:, None]
    value = tl.where(diagonal, value - 0.5 * gamma, value)
    _store_mirrored(h + base, value, i, j, rows, cols, d)
    total = tl.sum(tl.sum(value * value, 1), 0)
    tl.store(sums + b * tiles + t, tl.where(i == j, total, 2 * total))


@triton.jit(do_not_specialize=["tiles"])
def square_kernel(
    h, q, sums, fourths, d, tiles,
    STORE: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """STORE: q <- h²/‖h‖².  Otherwise: partial sums of the squares of h², where h is that q."""
    if EIGHTS:
        d = d // 8 * 8
    b, t, i, j, rows, cols, base = _tile(d, tiles, TILE)
    value = tl.zeros((TILE, TILE), tl.float32)
    value = _gram_tile(value, h + base, rows, cols, d, d, d, 1, DEPTH, EVEN)
    if STORE:
        value = value / tl.maximum(add_up(sums, b, tiles), 1e-30)
        _store_mirrored(q + base, value, i, j, rows, cols, d)
    else:
        total = tl.sum(tl.sum(value * value, 1), 0)
        tl.store(fourths + b * tiles + t, tl.where(i == j, total, 2 * total))


@triton.jit(do_not_specialize=["tiles"])
def product_kernel(
    K, P, d, tiles,
    TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """P <- K Kᵀ."""
    if EIGHTS:
        d = d // 8 * 8
    _, _, i, j, rows, cols, base = _tile(d, tiles, TILE)
    value = tl.zeros((TILE, TILE), tl.float32)
    value = _gram_tile(value, K + base, rows, cols, d, d, d, 1, DEPTH, EVEN)
    _store_mirrored(P + base, value, i, j, rows, cols, d)


@triton.jit(do_not_specialize=["chunks"])
def split_kernel(
    X, summands, units, d, size, chunks,
    DIVIDE: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """X (b, d, d) in fp32 as a sum of bf16 matrices, the smallest first: (b, COUNT, size, size).

    DIVIDE: X is first divided by its block's power of two in `units`. PADDED: `size` is more than
    d, and the padding is zero.
    """
    b = tl.program_id(0) // chunks
    at = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    there = at < size * size
    place, inside = at, there
    if PADDED:
        place = at // size * d + at % size
        inside = there & (at // size < d) & (at % size < d)
    x = tl.load(X + b.to(tl.int64) * d * d + place, inside, 0.0)
    if DIVIDE:
        x = x / tl.load(units + b)
    out = summands + b.to(tl.int64) * COUNT * size * size + at
    high = x.to(tl.bfloat16)
    x = x - high.to(tl.float32)  # exact, like the next difference
    middle = x.to(tl.bfloat16)
    if COUNT == 3:
        low = (x - middle.to(tl.float32)).to(tl.bfloat16)
        tl.store(out, low, there)
    tl.store(out + (COUNT - 2) * size * size, middle, there)
    tl.store(out + (COUNT - 1) * size * size, high, there)


@triton.jit
def _product_tile(acc, x, k, rows, cols, d, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """acc + a tile of X K, both d×d."""
    depth = tl.arange(0, DEPTH)
    left_at = x + rows[:, None] * d + depth[None, :]
    right_at = k + depth[:, None] * d + cols[None, :]
    for start in range(0, d, DEPTH):
        if EVEN:
            left = tl.load(left_at)
            right = tl.load(right_at)
        else:
            inside = start + depth < d
            left = tl.load(left_at, (rows < d)[:, None] & inside[None, :], 0.0)
            right = tl.load(right_at, inside[:, None] & (cols < d)[None, :], 0.0)
        acc = _multiply_add(left, right, acc)
        left_at += DEPTH
        right_at += DEPTH * d
    return acc


@triton.jit(do_not_specialize=["tiles"])
def sum_product_kernel(
    summands, K, out, d, tiles,
    COUNT: tl.constexpr, LAST: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """out (b, 2, d, d) <- (Σ X K)ᵀ of the summands X (b, COUNT, d, d), as a sum of two.

    LAST: out (b, d, d) <- (Σ X K)ᵀ in fp32. It is known to be symmetric, so only the tiles on and
    below the diagonal are computed. Small summands come first: matrix units truncate their sums at
    each step instead of rounding, which matters least while the sums are small.
    """
    if EIGHTS:
        d = d // 8 * 8
    b, t, i, j, rows, cols, base = _tile(d, tiles, TILE)
    if not LAST:
        side = tl.cdiv(d, TILE)
        i = t // side
        j = t % side
        rows = i * TILE + tl.arange(0, TILE)
        cols = j * TILE + tl.arange(0, TILE)
    first = summands + b.to(tl.int64) * COUNT * d * d
    acc = tl.zeros((TILE, TILE), tl.float32)
    for n in tl.static_range(COUNT):
        acc = _product_tile(acc, first + n * d * d, K + base, rows, cols, d, DEPTH, EVEN)
    if LAST:
        _store_mirrored(out + base, acc, i, j, rows, cols, d)
    else:
        inside = (cols < d)[:, None] & (rows < d)[None, :]
        at = out + b.to(tl.int64) * 2 * d * d + cols[:, None] * d + rows[None, :]
        value = tl.trans(acc)
        high = value.to(tl.bfloat16)
        tl.store(at, (value - high.to(tl.float32)).to(tl.bfloat16), inside)
        tl.store(at + d * d, high, inside)


@triton.jit(do_not_specialize=["rows", "tiles"])
def narrow_multiply_kernel(
    X, M, out, rows, d, tiles, m_row, m_col, ROWS: tl.constexpr, D: tl.constexpr
):
    """out <- X M, for X (b, rows, d) with a narrow last axis."""
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


@triton.jit(do_not_specialize=["rows", "parts"])
def narrow_gram_kernel(X, sums, rows, d, parts, ROWS: tl.constexpr, D: tl.constexpr):
    """Partial sums of XᵀX, one per part of the rows, for X (b, rows, d) with a narrow last axis."""
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
