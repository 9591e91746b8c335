"""Between parameters and stacks of blocks: gather gradients, and the tail of the step.

A *stack* holds the blocks of many parameters one after the other. `entries` (six int64 each) says
where a block is: parameter, offset in it, distance of its rows, columns, elements, offset in the
stack. `items` (four int32 each) are shares of the work, ROWS×COLS of a block: entry, first row,
first column, and the place of its partial sum of squared gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootfree.kernels.triton_diagonal import _pointer, _store_state

_MANY = tl.constexpr(2**30)


@triton.jit
def _share(items, entries, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which parameter; where the share begins in it and in the stack; offsets from there; mask."""
    item = items + 4 * tl.program_id(0)
    entry = entries + 6 * tl.load(item).to(tl.int64)
    row = tl.load(item + 1)
    col = tl.multiple_of(tl.load(item + 2), COLS)
    stride = tl.load(entry + 2)
    columns = tl.load(entry + 3)
    base = tl.load(entry + 1) + row * stride + col
    stack = tl.load(entry + 5) + row * columns + col
    # What is left of a block may be more than an int32 holds; a share needs to know less.
    left = tl.minimum(tl.load(entry + 4) - row * columns - col, _MANY).to(tl.int32)
    stride = stride.to(tl.int32)
    columns = columns.to(tl.int32)
    if ALIGNED:
        base = tl.multiple_of(base, 8)
        stack = tl.multiple_of(stack, 8)
        left = tl.multiple_of(left, 8)
        stride = tl.multiple_of(stride, 8)
        columns = tl.multiple_of(columns, 8)
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    inside = rows * columns + cols
    within = columns - col
    if ALIGNED:
        within = tl.multiple_of(within, 8)
    mask = (cols < within) & (inside < left)
    return tl.load(entry), base, rows * stride + cols, stack, inside, mask, tl.load(item + 3)


@triton.jit
def gather_kernel(
    items, entries, there, stack, squares,
    G: tl.constexpr, SQUARES: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """stack <- gradients; partial sums of their squares, in float64: fp32 has not the range."""
    which, base, at, first, inside, mask, place = _share(items, entries, ALIGNED, ROWS, COLS)
    g = tl.load(_pointer(there, which, G, ALIGNED) + base + at, mask, 0.0).to(tl.float32)
    tl.store(stack + first + inside, g.to(stack.dtype.element_ty), mask)
    if SQUARES:
        # Scaled by the largest, so that fp32 is enough for all but the last product.
        largest = tl.max(tl.max(tl.abs(g), 1), 0)
        unit = g * (1 / tl.maximum(largest, 1e-38))
        total = tl.sum(tl.sum(unit * unit, 1), 0).to(tl.float64)
        tl.store(squares + place, total * largest.to(tl.float64) * largest.to(tl.float64))


@triton.jit
def stack_squares_kernel(
    items, entries, stack, sums, cap,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Partial sums of (u/cap)², one an item."""
    _, _, _, first, inside, mask, _ = _share(items, entries, ALIGNED, ROWS, COLS)
    u = tl.load(stack + first + inside, mask, 0.0).to(tl.float32) * (1 / cap)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(u * u, 1), 0))


@triton.jit
def cap_kernel(sums, spans, sizes, scales, BLOCK: tl.constexpr):
    """scale <- min(1, cap/rms(u)) of parameter i, whose items are spans[2i] .. spans[2i+1]."""
    i = tl.program_id(0)
    end = tl.load(spans + 2 * i + 1)
    total = tl.zeros((), tl.float32)
    for begin in range(tl.load(spans + 2 * i), end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(sums + at, at < end, 0.0), 0)
    rms = tl.sqrt(total / tl.load(sizes + i))
    tl.store(scales + i, tl.where(rms > 1, 1 / rms, 1.0))


@triton.jit
def tail_kernel(
    items, entries, here, stack, scales, lr_at, count, lr, alpha1, kappa,
    P: tl.constexpr, M: tl.constexpr, MOMENTUM: tl.constexpr, CAP: tl.constexpr,
    LR_AT: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """m <- α₁ m + scale·u + κ p;  p <- p - β₁ m."""
    which, base, at, first, inside, mask, _ = _share(items, entries, ALIGNED, ROWS, COLS)
    p_at = _pointer(here, which, P, ALIGNED) + base
    u = tl.load(stack + first + inside, mask, 0.0).to(tl.float32)
    p = tl.load(p_at + at, mask, 0.0).to(tl.float32)
    if MOMENTUM:
        m_at = _pointer(here, count + which, M, ALIGNED) + base
        m = tl.load(m_at + at, mask, 0.0).to(tl.float32)
    if CAP:
        u = u * tl.load(scales + which)
    u += kappa * p
    if MOMENTUM:
        u += alpha1 * m
        counter = tl.zeros((), tl.int32)
        if tl.bfloat16 == M:
            counter = tl.load(tl.load(here + 2 * count + which).to(tl.pointer_type(tl.int32)))
        _store_state(m_at, at, mask, u, base + at, counter)
    step = lr
    if LR_AT:
        step = tl.load(lr_at).to(tl.float32)
    tl.store(p_at + at, p - step * u, mask)
