"""Kernels between parameters and stacks of blocks: gathering gradients, and the tail of the step.

A *stack* holds the blocks of many parameters one after the other. `rectangles` (seven int64 each)
say where blocks are: parameter, offset in it, distance of rows, columns, elements, offset in the
stack, distance of rows there. `items` (four int32 each) are the work of one program each:
rectangle, first row, first column, and the index of its partial sum of squared gradients.

`numbers` (fp32): β₁, α₁, κ, the cap, r; in places 9 and 10 the least RMS that is scaled to r, and
c. Place 11 forbids changes if it is not 0. `scales`: a number per parameter for the direction, then
one per parameter for the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootfree.kernels.triton_shared import (
    LARGEST_GRADIENT,
    SKIP,
    clipped,
    load_pointer,
    store_state,
)

_MANY = tl.constexpr(2**30)
_LARGEST = tl.constexpr(3.4028234e38)


@triton.jit
def _place(
    items, number, rectangles, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Parameter; start and offsets in it and in the stack; mask; index of the partial sum."""
    item = items + 4 * number
    rectangle = rectangles + 7 * tl.load(item).to(tl.int64)
    row = tl.load(item + 1)
    col = tl.multiple_of(tl.load(item + 2), COLS)
    stride = tl.load(rectangle + 2)
    columns = tl.load(rectangle + 3)
    pitch = tl.load(rectangle + 6)
    base = tl.load(rectangle + 1) + row * stride + col
    stack = tl.load(rectangle + 5) + row * pitch + col
    # The rest of a rectangle may have more elements than an int32 holds; a program needs fewer.
    left = tl.minimum(tl.load(rectangle + 4) - row * columns - col, _MANY).to(tl.int32)
    stride = stride.to(tl.int32)
    columns = columns.to(tl.int32)
    pitch = pitch.to(tl.int32)
    if ALIGNED:
        base = tl.multiple_of(base, 8)
        stack = tl.multiple_of(stack, 8)
        left = tl.multiple_of(left, 8)
        stride = tl.multiple_of(stride, 8)
        columns = tl.multiple_of(columns, 8)
        pitch = tl.multiple_of(pitch, 8)
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    within = columns - col
    if ALIGNED:
        within = tl.multiple_of(within, 8)
    mask = (cols < within) & (rows * columns + cols < left)
    parameter = tl.load(rectangle)
    return (
        parameter,
        base,
        rows * stride + cols,
        stack,
        rows * pitch + cols,
        mask,
        tl.load(item + 3),
    )


@triton.jit
def _sum_of_squares(x):
    """Σx² in float64: squares of fp32 numbers need its range."""
    wide = x.to(tl.float64)
    return tl.sum(tl.sum(wide * wide, 1), 0)


@triton.jit
def gather_kernel(
    items, rectangles, gradients, stack, squares,
    G: tl.constexpr, SQUARES: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """stack <- limited gradients;  squares <- partial sums of their squares."""
    which, base, at, first, inside, mask, place = _place(
        items, tl.program_id(0), rectangles, ALIGNED, ROWS, COLS
    )
    g = tl.load(load_pointer(gradients, which, G, ALIGNED) + base + at, mask, 0.0).to(tl.float32)
    g = clipped(g, LARGEST_GRADIENT)
    tl.store(stack + first + inside, g.to(stack.dtype.element_ty), mask)
    if SQUARES:
        tl.store(squares + place, _sum_of_squares(g))


@triton.jit
def _finite(u):
    """Replace infinite entries by the largest number; a NaN stays NaN."""
    return tl.where(u > _LARGEST, _LARGEST, tl.where(u < -_LARGEST, -_LARGEST, u))


@triton.jit(do_not_specialize=["items_count"])
def squares_kernel(
    items, rectangles, state, stack, scales, numbers, sums, count, items_count,
    M: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, CAP: tl.constexpr,
    CLIP: tl.constexpr, OF_STEP: tl.constexpr, SEVERAL: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A partial sum per item: of u² or, OF_STEP, of the squared step without a coupled decay."""
    for i in tl.static_range(SEVERAL):
        number = tl.program_id(0) * SEVERAL + i
        if number < items_count:
            which, base, at, first, inside, mask, _ = _place(
                items, number, rectangles, ALIGNED, ROWS, COLS
            )
            u = tl.load(stack + first + inside, mask, 0.0).to(tl.float32)
            if CAP:
                u = _finite(u)
            if OF_STEP:
                if CAP:
                    u = u * tl.load(scales + which)
                if CLIP:
                    u = clipped(u, tl.load(numbers + 10))
                if MOMENTUM:
                    alpha1 = tl.load(numbers + 1)
                    m_at = load_pointer(state, count + which, M, ALIGNED) + base
                    m = alpha1 * tl.load(m_at + at, mask, 0.0).to(tl.float32) + u
                    if NESTEROV:
                        u += alpha1 * m
                    else:
                        u = m
            tl.store(sums + number, _sum_of_squares(u))


@triton.jit
def scale_kernel(
    sums, spans, sizes, numbers, scales, count, OF_STEP: tl.constexpr, BLOCK: tl.constexpr
):
    """min(1, cap/rms(u)) or, OF_STEP, r/max(rms(step), least) of parameter i.

    Its items are spans[2i] .. spans[2i+1].
    """
    i = tl.program_id(0)
    end = tl.load(spans + 2 * i + 1)
    total = tl.zeros((), tl.float64)
    for begin in range(tl.load(spans + 2 * i), end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(sums + at, at < end, 0.0), 0)
    rms = tl.sqrt(total / tl.load(sizes + i))
    if OF_STEP:
        least = tl.load(numbers + 9).to(tl.float64)
        scale = tl.load(numbers + 4) / tl.where(rms < least, least, rms)
        tl.store(scales + count + i, scale.to(tl.float32))
    else:
        cap = tl.load(numbers + 3)  # a single NaN makes the whole direction NaN, as in the rule
        tl.store(scales + i, tl.where(rms <= cap, 1.0, cap / rms).to(tl.float32))


@triton.jit
def tail_kernel(
    items, rectangles, state, stack, scales, lr_at, numbers, count,
    P: tl.constexpr, M: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    CAP: tl.constexpr, CLIP: tl.constexpr, RMS: tl.constexpr, DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """m <- α₁ m + u (+ κ p);  p <- (1 - β₁κ) p - β₁·step (see rules/momentum.py)."""
    if tl.load(numbers + SKIP) != 0:
        return
    which, base, at, first, inside, mask, _ = _place(
        items, tl.program_id(0), rectangles, ALIGNED, ROWS, COLS
    )
    p_at = load_pointer(state, which, P, ALIGNED) + base
    p = tl.load(p_at + at, mask, 0.0).to(tl.float32)
    if MOMENTUM:
        m_at = load_pointer(state, count + which, M, ALIGNED) + base
        m = tl.load(m_at + at, mask, 0.0).to(tl.float32)
    u = tl.load(stack + first + inside, mask, 0.0).to(tl.float32)
    if CAP:
        u = _finite(u) * tl.load(scales + which)
    if CLIP:
        u = clipped(u, tl.load(numbers + 10))
    lr = tl.load(lr_at).to(tl.float32)
    kappa = tl.load(numbers + 2)
    if DECOUPLED:
        p = p * (1 - lr * kappa)
    else:
        u += kappa * p
    step = u
    if MOMENTUM:
        alpha1 = tl.load(numbers + 1)
        step = u + alpha1 * m
        counter = tl.zeros((), tl.int32)
        if tl.bfloat16 == M:
            counter = tl.load(tl.load(state + 2 * count + which).to(tl.pointer_type(tl.int32)))
        store_state(m_at, at, mask, step, base + at, counter)
        if NESTEROV:
            step = u + alpha1 * step
    if RMS:
        step = step * tl.load(scales + count + which)
    tl.store(p_at + at, p - lr * step, mask)
