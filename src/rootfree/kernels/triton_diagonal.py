"""The diagonal methods in one pass over all parameters: the equations of rules/diagonal.py.

A program updates one chunk of one parameter. `items` (two int32 each) say which parameter and which
chunk. `state` holds the addresses of all parameters, then of all preconditioners, all momenta and,
for bf16 state, all rounding counters. `gradients` holds the addresses of the gradients, `counts`
those of the counts of steps. `numbers` (fp32): β₁, keep, gain, α₁, λ, κ, c, reach, β₂, B; the last
forbids changes if it is not 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootfree.kernels.triton_shared import clipped, load_pointer, store_state
from rootfree.rules import diagonal

LARGEST = tl.constexpr(diagonal.LARGEST)
START = tl.constexpr(diagonal.START)


@triton.jit
def _update(
    p_at, g_at, s_at, m_at, at, mask, counter, step, keep, gain, alpha1, lam, kappa, c, reach, most,
    AVERAGED: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr,
    CLIP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s <- keep·s + gain·g², and then

    heavy ball:  m <- α₁ m + g/(s+λ) + κ p;  p <- p - β₁ m
    AVERAGED:    m <- α₁ m + (1-α₁) g;       p <- (1 - β₁κ) p - β₁ m/(s+λ)
    NESTEROV:    u + α₁ m replaces m; if AVERAGED, α₁ m + (1-α₁) g does

    CLIP limits elements of g/(s+λ) to c, and g beforehand (rules/diagonal.py). FAST limits those
    of an average m/(s+λ) to `most`.
    """
    p = tl.load(p_at + at, mask).to(tl.float32)
    g = tl.load(g_at + at, mask).to(tl.float32)
    s = tl.load(s_at + at, mask).to(tl.float32)
    if CLIP:
        g = clipped(g, tl.sqrt(s + 1) * reach)
    s = keep * s + gain * (g * g)
    s = tl.where(s > LARGEST, LARGEST, s)
    if MOMENTUM:
        m = tl.load(m_at + at, mask).to(tl.float32)
    # The preconditioner is rounded before the momentum, as in the rule.
    store_state(s_at, at, mask, s, at, counter)
    if DECOUPLED:
        p = p * (1 - step * kappa)
    if AVERAGED:
        if CLIP:
            g = clipped(g, c * (s + lam))
            if FAST:
                m = clipped(m, most * (s + lam))
        m += (1 - alpha1) * (g - m)
        store_state(m_at, at, mask, m, at, counter + 1)
        if NESTEROV:
            m += (1 - alpha1) * (g - m)
        u = m / (s + lam)
    else:
        u = g / (s + lam)
        if CLIP:
            u = clipped(u, c)
        if not DECOUPLED:
            u += kappa * p
        if MOMENTUM:
            m = u + alpha1 * m
            store_state(m_at, at, mask, m, at, counter + 1)
            u = u + alpha1 * m if NESTEROV else m
    tl.store(p_at + at, p - step * u, mask)


@triton.jit
def diagonal_kernel(
    items, sizes, state, gradients, counts, lr_at, numbers, count,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, AVERAGED: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, CLIP: tl.constexpr,
    FAST: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk of one parameter; FAST: with a larger β₂ in the first steps."""
    if tl.load(numbers + 10) != 0:
        return
    which = tl.load(items + 2 * tl.program_id(0))
    start = tl.load(items + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(sizes + which)
    p_at = load_pointer(state, which, P, ALIGNED)
    g_at = load_pointer(gradients, which, G, ALIGNED)
    s_at = load_pointer(state, count + which, S, ALIGNED)
    m_at = s_at
    if MOMENTUM:
        m_at = load_pointer(state, 2 * count + which, S, ALIGNED)
    counter = tl.zeros((), tl.int32)
    if tl.bfloat16 == S:
        counter = tl.load(tl.load(state + 3 * count + which).to(tl.pointer_type(tl.int32)))
    step = tl.load(lr_at).to(tl.float32)
    keep = tl.load(numbers + 1)
    gain = tl.load(numbers + 2)
    alpha1 = tl.load(numbers + 3)
    lam = tl.load(numbers + 4)
    kappa = tl.load(numbers + 5)
    c = tl.load(numbers + 6)
    reach = tl.load(numbers + 7)
    most = c
    if FAST:  # keep, gain and reach are those of β₂ after the start
        beta2 = tl.load(numbers + 8)
        steps = tl.load(tl.load(counts + which).to(tl.pointer_type(tl.int64)))
        rate = START / (steps.to(tl.float32) + (START + 1))
        starting = rate > beta2
        keep = tl.where(starting, 1 - rate, keep)
        gain = tl.where(starting, rate * tl.load(numbers + 9), gain)
        reach = tl.where(starting, reach * tl.sqrt(beta2 / rate), reach)
        most = tl.where(starting, c, float("inf"))
    if start + CHUNK <= size:  # without a mask, four numbers are read at once
        for begin in tl.static_range(0, CHUNK, BLOCK):
            at = start + begin + tl.arange(0, BLOCK)
            _update(
                p_at, g_at, s_at, m_at, at, None, counter,
                step, keep, gain, alpha1, lam, kappa, c, reach, most,
                AVERAGED, MOMENTUM, NESTEROV, DECOUPLED, CLIP, FAST,
            )  # fmt: skip
    else:
        for begin in tl.static_range(0, CHUNK, BLOCK):
            at = start + begin + tl.arange(0, BLOCK)
            mask = at < size
            _update(
                p_at, g_at, s_at, m_at, at, mask, counter,
                step, keep, gain, alpha1, lam, kappa, c, reach, most,
                AVERAGED, MOMENTUM, NESTEROV, DECOUPLED, CLIP, FAST,
            )  # fmt: skip
