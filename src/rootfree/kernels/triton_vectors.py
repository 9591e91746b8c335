"""Inverse-free factors of vectors, which are diagonal: one kernel does the whole step of a block.

The equations are in rules/if_shampoo.py and rules/if_whitening.py; `numbers` is as in
triton_factors.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootfree.kernels.triton_factors import followed
from rootfree.kernels.triton_shared import LARGEST, LEAST, SKIP, root_of, round_stochastically


@triton.jit(do_not_specialize=["size"])
def vector_kernel(
    G, K, started, means, counters, numbers, size,
    REFRESH: tl.constexpr, START: tl.constexpr, WHITEN: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One axis with a diagonal factor k: h = ½(B(kg)² + λk² - γ), k <- k(1 - β₂h/‖h‖), g <- k²g.

    WHITEN: p = k² replaces k in h, ‖2h‖ replaces ‖h‖, and λ = ρv with v in `means`.
    """
    if tl.load(numbers + SKIP) != 0:
        return
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
        if START:
            # Read before the sum, at which all warps wait: it is written below.
            known = tl.load(started + b) != 0
            if WHITEN:
                before = tl.load(means + b)
            rms = _root_mean_square(g_at, size, BLOCK)
            has_gradient = (rms > 0) & (rms < float("inf"))
            fresh = (known == 0) & has_gradient
            moves = known | has_gradient
            if WHITEN:
                v = followed(before, rms, beta2, has_gradient, fresh)
                tl.store(means + b, v)
                lam = lam * v + LEAST
                moves = has_gradient
            if fresh:
                scale = 1 / tl.maximum(tl.sqrt(B) * rms, 1e-15)
                if WHITEN:
                    scale = tl.sqrt(scale)
                tl.store(started + b, tl.full((), 1, started.dtype.element_ty))
        norm = tl.zeros((), tl.float32)
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            g = tl.load(g_at + at, at < size, 0.0).to(tl.float32)
            k = tl.load(k_at + at, at < size, 0.0).to(tl.float32) * scale
            h = tl.where(at < size, _tangent(g, k, B, lam, gamma, WHITEN), 0.0)
            if NORM == "frobenius":
                norm += tl.sum(h * h, 0)
            else:
                norm = tl.maximum(norm, tl.max(tl.abs(h), 0))
        if NORM == "frobenius":
            norm = tl.sqrt(norm)
        if NORM == "none":
            norm = tl.zeros((), tl.float32)
        if WHITEN:
            norm = 2 * norm
        step = beta2 / tl.maximum(norm, 1.0)
        if START:  # blocks that wait for a gradient do not move
            step = tl.where(moves, step, 0.0)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = at < size
        g = tl.load(g_at + at, mask, 0.0).to(tl.float32)
        k = tl.load(k_at + at, mask, 0.0).to(tl.float32)
        if REFRESH:
            k = k * scale
            k = k * (1 - step * _tangent(g, k, B, lam, gamma, WHITEN))
            if K.dtype.element_ty == tl.bfloat16:
                rounded = round_stochastically(k, at, tl.load(counters + b))
                tl.store(k_at + at, rounded, mask)
                k = rounded.to(tl.float32)
            else:
                tl.store(k_at + at, k, mask)
        u = k * k * g if WHITEN else k * (k * g)
        tl.store(g_at + at, u.to(G.dtype.element_ty), mask)


@triton.jit
def _root_mean_square(g_at, size, BLOCK: tl.constexpr):
    total = tl.zeros((), tl.float64)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        g = tl.load(g_at + at, at < size, 0.0).to(tl.float64)
        total += tl.sum(g * g, 0)
    return root_of(total / size)


@triton.jit
def _tangent(g, k, B, lam, gamma, WHITEN: tl.constexpr):
    if WHITEN:
        k = k * k
    root = tl.minimum(tl.abs(k * g), 1e15) * tl.sqrt(B)
    return 0.5 * (tl.minimum(root * root, LARGEST) + lam * k * k - gamma)
