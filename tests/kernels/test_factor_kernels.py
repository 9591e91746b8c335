"""Each kernel of the factors against the same thing in plain float64.

Operands are bf16 numbers and sums are in fp32, so a result that is stored in bf16 is off by half
a spacing (EPS/2), one that is stored in fp32 by rounding of the sum.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels.devices import DEVICE, EPS, close, normal, run, zeros
from rootfree.kernels import axis_products
from rootfree.kernels.factors import _BLOCK, powers_of_two
from rootfree.kernels.halves import join, split
from rootfree.kernels.launch import triton_kernels
from rootfree.kernels.rounding import stochastic_round_
from rootfree.rules.if_shampoo import exponents
from rootfree.structures.base import SLACK, schatten8

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
FACTORS, PRODUCTS = triton_kernels().factors, triton_kernels().products
SIZES = [1, 5, 33, 64, 130]  # tiles of 32, 64 and 128, with and without remainder
B = 2  # blocks


def numbers(*, rate: float = 8.0, beta2: float = 0.3, lam: float = 0.1, gamma: float = 0.7):
    """The table of hyper-parameters: B, β₂, λ and γ after five of the tail."""
    values = [math.nan] * 5 + [rate, beta2, lam, gamma, math.nan, math.nan, 0.0]
    return torch.tensor(values, dtype=FP32, device=DEVICE)


def halves(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed).to(BF16)


# -- over elements ---------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [2, 3])
def test_start(axes):
    squares = normal(5, 7, seed=1).double().square()
    squares[1], squares[2], squares[3] = 0.0, math.inf, 1e-60
    started = torch.tensor([0, 0, 0, 0, 1], dtype=torch.bool, device=DEVICE)
    scales = zeros(5)
    run(
        FACTORS.start_kernel, 5, squares, started, scales, numbers(), 7, 21,
        AXES=axes, GIVEN=False, num_warps=1,
    )  # fmt: skip
    root = (8.0 * squares.sum(1) / 21).sqrt().clamp(min=1e-15)
    expected = root.pow(-1 / axes)
    expected[[1, 2, 4]] = 1.0  # no gradient, not a number, started before
    close(scales, expected, rtol=1e-5)
    assert started.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("in_halves", [False, True])
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("d", [5, 65])
def test_trace(in_halves, start, d):
    before = normal(B, d, d)
    K, lower = split(before) if in_halves else (before.to(BF16), None)
    whole = before if in_halves else K.float()
    chunks = -(-d * d // _BLOCK)
    traces = zeros(B, chunks)
    scales = torch.tensor([1.0, 3.0], device=DEVICE)
    run(
        FACTORS.trace_kernel, B * chunks, K, lower if in_halves else K, traces, scales, d * d,
        chunks, START=start, HALVES=in_halves, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    factor = scales if start else torch.ones(2, device=DEVICE)
    expected = whole * factor[:, None, None]
    assert torch.equal(K, split(expected)[0] if in_halves else expected.to(BF16))
    if in_halves:
        assert torch.equal(join(K, lower), expected)
    close(traces.sum(1), K.double().square().sum((1, 2)), rtol=1e-5)


@pytest.mark.parametrize("axes", [2, 3])
def test_powers_of_two_are_those_of_the_rule(axes):
    Ks = [halves(40, d, d, seed=d) for d in (5, 8, 3)[:axes]]
    for n, K in enumerate(Ks):
        K *= torch.exp2(9 * normal(40, seed=10 + n))[:, None, None]
    traces = [K.float().square().sum(2) for K in Ks]
    got = powers_of_two((), [K.shape[1] for K in Ks], traces)
    expected = exponents([t.sum(1) / t.shape[1] for t in traces])
    assert torch.equal(got.log2(), torch.stack(expected, 1))


def test_whitening_follows_the_size_of_the_gradient():
    squares = normal(5, 7, seed=1).double().square()
    squares[1], squares[2], squares[4] = 0.0, math.inf, 1e-60
    started = torch.tensor([0, 0, 0, 1, 1], dtype=torch.bool, device=DEVICE)
    means, (scales, lams) = torch.full((5,), 2.0, device=DEVICE), zeros(2, 5)
    moves = zeros(5, dtype=torch.bool)
    run(
        FACTORS.follow_kernel, 5, squares, started, means, scales, lams, moves,
        numbers(beta2=0.25, lam=0.1), 7, 21, AXES=2, num_warps=1,
    )  # fmt: skip
    mean = squares.sum(1) / 21
    close(scales, torch.where(torch.arange(5, device=DEVICE) == 0, mean**-0.125, 1.0), rtol=1e-5)
    expected = torch.tensor([mean[0], 2.0, 2.0, 1.995 + mean[3] / 400, 1.995], device=DEVICE)
    close(means, expected, rtol=1e-6)
    close(lams, 0.1 * expected, rtol=1e-6)
    assert started.tolist() == [True, False, False, True, True]
    assert moves.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, math.inf, -math.inf, 1e-42, -3e38, math.nan])
def test_halves_of_special_numbers(number):
    """A product of zero moves nothing: what is read is written again."""
    K, lower = split(torch.full((B, 3, 3), number, device=DEVICE))
    before, product, sums = (K.clone(), lower.clone()), zeros(B, 3, 3, dtype=BF16), zeros(B, 1)
    moved(K, lower, product, norm="none", sums=sums, fourths=sums, started=None)
    assert torch.equal(K.view(torch.int16), before[0].view(torch.int16))
    assert torch.equal(lower, before[1])


@pytest.mark.parametrize("size", [3, _BLOCK + 1])
@pytest.mark.parametrize("scale", [1.0, 5e3, 1e6, 1e30])
def test_large_entries_are_scaled_down_by_a_power_of_two(size, scale):
    Ghat = halves(B, size)
    Ghat[1] *= scale
    before = Ghat.clone()
    chunks = -(-size // _BLOCK)
    largest = zeros(B, chunks)
    arguments = (Ghat, largest, size, chunks)
    run(FACTORS.largest_kernel, B * chunks, *arguments, BLOCK=_BLOCK, num_warps=8)
    assert torch.equal(largest.amax(1), before.float().abs().amax(1))
    run(FACTORS.scale_down_kernel, B * chunks, *arguments, BLOCK=_BLOCK)
    assert torch.equal(Ghat[0], before[0])
    if scale == 1.0:
        assert torch.equal(Ghat, before)
    else:
        assert 0.5 <= Ghat[1].abs().amax() <= 1
        unit = before[1].double() / Ghat[1].double()
        assert (unit == unit[0]).all()
        assert torch.frexp(unit[0])[0] == 0.5


def moved(
    K, lower, product, *, norm, sums, fourths, started, counters=None, axis=1, beta2=0.3,
    power=1.0, whiten=False,
):  # fmt: skip
    d = K.shape[1]
    chunks = -(-d * d // _BLOCK)
    powers = torch.ones(B, 3, device=DEVICE)
    powers[:, axis] = power
    run(
        FACTORS.move_kernel, B * chunks, K, K if lower is None else lower, product, sums, fourths,
        powers, K if started is None else started, K if counters is None else counters,
        numbers(beta2=beta2), d * d, 3, chunks, sums.shape[1], axis, SLACK,
        NORM=norm, START=started is not None, HALVES=lower is not None, WHITEN=whiten,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("norm", ["none", "frobenius", "spectral"])
@pytest.mark.parametrize("d", [5, 65])
def test_move(norm, d, whiten):
    before, product = normal(B, d, d), halves(B, d, d, seed=1)
    K, lower = split(before)
    sums, fourths = normal(B, 3, seed=2).square(), normal(B, 3, seed=3).square()
    sums[1] *= 50
    moved(
        K, lower, product, norm=norm, sums=sums, fourths=fourths, started=None, power=4.0,
        whiten=whiten,
    )  # fmt: skip
    size = torch.ones(B, dtype=FP64, device=DEVICE)
    if norm != "none":
        size = sums.double().sum(1).sqrt() * (2 if whiten else 1)
    if norm == "spectral":
        size = size * fourths.double().sum(1).pow(1 / 8) * SLACK
    step = 0.3 / size.clamp(min=1.0)
    whole = join(K, lower)
    expected = 4 * (before.double() - step[:, None, None] * product.double())
    close(whole, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(K, split(whole)[0])
    close(K, whole, rtol=EPS / 2)


def test_move_rounds_like_the_rule():
    K, product = normal(B, 9, 9).to(BF16), halves(B, 9, 9, seed=1)
    sums = zeros(B, 1)
    counters = torch.tensor([3, -5], dtype=torch.int32, device=DEVICE)
    # β₂ is a power of two and the norm below one: the step itself is exact.
    expected = K.clone()
    stochastic_round_(expected, K.float() - 0.25 * product.float(), counters + 2)
    moved(
        K, None, product, norm="frobenius", sums=sums, fourths=sums, started=None,
        counters=counters, axis=2, beta2=0.25,
    )  # fmt: skip
    assert torch.equal(K, expected)


def test_blocks_that_wait_do_not_move():
    before, product = normal(B, 5, 5), halves(B, 5, 5, seed=1)
    (K, lower), sums = split(before), zeros(B, 1)
    started = torch.tensor([False, True], device=DEVICE)
    moved(K, lower, product, norm="none", sums=sums, fourths=sums, started=started)
    whole = join(K, lower)
    assert torch.equal(whole[0], before[0])
    close(whole[1], before[1].double() - 0.3 * product[1].double(), rtol=1e-5, atol=1e-6)


# -- matrix products -------------------------------------------------------------------------


def tangent(X, half, *, traces, unit=1.0, rate=8.0, lam=0.1, gamma=0.7, gram=None, lams=None):
    d, r = X.shape[1:]
    tile, tiles = axis_products.tiling(d, r)
    h, sums = zeros(B, d, d, dtype=BF16), zeros(B, tiles)
    largest = torch.full((B, 1), unit, device=DEVICE)
    run(
        PRODUCTS.tangent_kernel,
        B * tiles, X, half, half if gram is None else gram, h, sums, largest, traces[0], traces[-1],
        numbers(rate=rate, lam=lam, gamma=gamma) if lams is None else lams,
        numbers(rate=rate, lam=lam, gamma=gamma),
        d, r, *X.stride(), tiles, 1, traces[0].shape[1], traces[-1].shape[1], d, r,
        GRAM=gram is not None, GIVEN=False, OTHERS=len(traces), ROW_MAJOR=X.stride(2) == 1,
        OF_BLOCK=lams is not None, **tile,
    )  # fmt: skip
    return h, sums


def expected_tangent(X, half, *, traces, unit=1.0, rate=8.0, lam=0.1, gamma=0.7):
    X, half = X.double(), half.double()
    traced = math.prod([t.double().sum(1) for t in traces])[:, None, None]
    damping = lam / X.shape[2] * traced  # λ ∏ tr(KⱼᵀKⱼ)/dⱼ
    identity = torch.eye(X.shape[1], dtype=FP64, device=DEVICE)
    weight = min(rate * unit**2, 1e15) / X.shape[2]
    return (weight * X @ X.mT + damping * half.mT @ half - gamma * identity) / 2


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("r", [3, 64])
@pytest.mark.parametrize("others", [1, 2])
def test_tangent(d, r, others):
    X, half = halves(B, d, r), halves(B, d, d, seed=1)
    traces = [normal(B, 3, seed=5 + i).square() for i in range(others)]
    h, sums = tangent(X, half, traces=traces)
    expected = expected_tangent(X, half, traces=traces)
    close(h, expected, rtol=EPS / 2, atol=1e-5)
    assert torch.equal(h, h.mT)
    close(sums.sum(1), expected.square().sum((1, 2)), rtol=1e-5)


def test_tangent_of_a_transposed_view_and_of_a_given_gram():
    X, half = halves(B, 7, 40).mT, halves(B, 40, 40, seed=1)
    traces = [normal(B, 1).square()]
    expected = expected_tangent(X, half, traces=traces)
    close(tangent(X, half, traces=traces)[0], expected, rtol=EPS / 2, atol=1e-5)
    gram = X.float() @ X.float().mT
    got, _ = tangent(X, half, traces=traces, gram=gram)
    close(got, expected, rtol=EPS / 2, atol=1e-5)


def test_tangent_with_a_damping_of_each_block():
    X, half, traces = halves(B, 5, 9), halves(B, 5, 5, seed=1), [normal(B, 1).square()]
    lams = torch.tensor([0.3, 2.0], device=DEVICE)
    h, _ = tangent(X, half, traces=traces, lams=lams, lam=math.nan)
    for b, lam in enumerate(lams.tolist()):
        close(h[b], expected_tangent(X, half, traces=traces, lam=lam)[b], rtol=EPS / 2, atol=1e-5)


@pytest.mark.parametrize("unit", [2.0**20, 2.0**100])
def test_tangent_of_what_was_scaled_down(unit):
    X, half = halves(B, 33, 64).clamp(-1, 1), halves(B, 33, 33, seed=1)
    traces = [normal(B, 1).square()]
    h, sums = tangent(X, half, traces=traces, unit=unit)
    expected = expected_tangent(X, half, traces=traces, unit=unit)
    close(h, expected, rtol=EPS / 2, atol=1e-5)
    close(sums.sum(1), expected.square().sum((1, 2)), rtol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_tangent_without_damping(size):
    """λ = 0 leaves 10⁻³⁰; the quotient in the kernel stays finite for all that is not scaled."""
    X, half = (size * torch.ones(B, 5, 600, device=DEVICE)).to(BF16), halves(B, 5, 5)
    traces = [zeros(B, 1) + 1e-5]
    h, _ = tangent(X, half, traces=traces, lam=1e-30)
    close(h, expected_tangent(X, half, traces=traces, lam=1e-30), rtol=EPS / 2, atol=1e-5)


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_squares_give_the_schatten_norm(d, scale):
    h = normal(B, d, d)
    h = ((h + h.mT) * scale).to(BF16)
    tile, tiles = axis_products.tiling(d, d)
    q = zeros(B, d, d, dtype=BF16)
    sums, fourths = zeros(B, tiles), zeros(B, tiles)
    sums[:, 0] = h.float().square().sum((1, 2))
    shape = (d, tiles)
    run(PRODUCTS.square_kernel, B * tiles, h, q, sums, fourths, *shape, STORE=True, **tile)
    close(q, h.double() @ h.double() / sums.double().sum(1)[:, None, None], rtol=EPS / 2, atol=1e-5)
    run(PRODUCTS.square_kernel, B * tiles, q, q, sums, fourths, *shape, STORE=False, **tile)
    close(fourths.sum(1), (q.double() @ q.double()).square().sum((1, 2)), rtol=1e-5)
    got = sums.sum(1).sqrt() * fourths.sum(1).pow(1 / 8) * SLACK
    # bf16 rounding of what is squared: EPS/2 in σ², twice that in σ⁴, an eighth of it in the root
    close(got, schatten8(h.double(), dtype=FP64), rtol=EPS)
    assert (got >= torch.linalg.matrix_norm(h.float(), ord=2)).all()


@pytest.mark.parametrize("d", SIZES)
def test_symmetric_product(d):
    K = halves(B, d, d)
    P = axis_products.symmetric_product((), K)
    close(P, K.double() @ K.double().mT, rtol=EPS / 2, atol=1e-5)
    assert torch.equal(P, P.mT)


@pytest.mark.parametrize("shape", [(6, 5), (33, 40), (3, 7, 9), (300, 4), (2, 3, 33), (5, 3, 17)])
def test_products_along_every_axis(shape):
    G = halves(B, *shape)
    for n, d in enumerate(shape):
        M = halves(B, d, d, seed=n + 1)
        for matrix in (M, M.mT):
            expected = torch.einsum(
                "bij,bi...->bj...", matrix.double(), G.double().movedim(n + 1, 1)
            ).movedim(1, n + 1)
            got = axis_products.multiply((), G, n, matrix)
            # The library on a CPU may add in bf16.
            close(got, expected, rtol=EPS, atol=EPS)
            out = torch.empty_like(G)
            assert axis_products.multiply((), G, n, matrix, out) is out
            assert torch.equal(out, got)


@pytest.mark.parametrize("d", [1, 9, 16, 17, 32])
def test_narrow_multiply_is_precise(d):
    X, M = halves(B, 3, 100, d), halves(B, d, d, seed=1)
    got = axis_products.multiply((), X, 2, M)
    close(got, torch.einsum("bxyi,bij->bxyj", X.double(), M.double()), rtol=EPS / 2, atol=1e-5)


@pytest.mark.parametrize("d", [1, 9, 32])
@pytest.mark.parametrize("rows", [130, 4099])
def test_gram_of_few_rows_and_many_columns(d, rows):
    G = halves(B, rows, d)
    X = axis_products.matricised(G, 1)
    gram = axis_products.long_gram((), X)
    close(gram, X.double() @ X.double().mT, rtol=1e-4, atol=1e-5)
    first = axis_products.matricised(G.mT.contiguous(), 0)  # the library's
    close(axis_products.long_gram((), first), X.double() @ X.double().mT, rtol=EPS, atol=EPS)


@pytest.mark.parametrize("shape", [(6, 5), (3, 7, 9)])
def test_matricised(shape):
    G = halves(B, *shape)
    for n, d in enumerate(shape):
        assert torch.equal(axis_products.matricised(G, n), G.movedim(n + 1, 1).reshape(B, d, -1))
