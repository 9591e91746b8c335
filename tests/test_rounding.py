"""Stochastic rounding to bfloat16: right on average, exact where it can be, repeatable."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import rootfree
from rootfree.kernels.rounding import hash_noise, stochastic_round_, widened


def counter(value: int = 0) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


def rounded(wide: Tensor, count: int = 0) -> Tensor:
    narrow = torch.empty_like(wide, dtype=torch.bfloat16)
    stochastic_round_(narrow, wide, counter(count))
    return narrow


def neighbours(value: float) -> tuple[float, float]:
    """The bf16 numbers around a float32 number, towards and away from zero."""
    bits = torch.tensor(value).view(torch.int32)
    low = bits & -0x10000
    return low.view(torch.float32).item(), (low + 0x10000).view(torch.float32).item()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


@given(value=finite, count=st.integers(-(2**31), 2**31 - 1))
def test_the_result_is_one_of_the_two_neighbours(value, count):
    got = set(rounded(torch.full((64,), value), count).float().tolist())
    assert got <= set(neighbours(value))


@given(value=finite, count=st.integers(-(2**31), 2**31 - 1))
def test_numbers_that_bf16_can_hold_stay_as_they_are(value, count):
    exact = torch.full((64,), neighbours(value)[0]).bfloat16()
    assert torch.equal(rounded(exact.float(), count), exact)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("sixteenths", range(1, 16))
def test_the_mean_is_right(sixteenths, sign):
    """n draws that go up with probability f: the mean of f̂ is f within 5 √(f(1-f)/n).

    The noise is a fixed function, so this either holds or does not: five standard deviations are
    what a fair coin passes in all but 6 of 10 million cases.
    """
    fraction, n, counts = sixteenths / 16, 4096, 16
    value = sign * (1 + fraction * 2**-7)  # bf16 has 7 bits after the leading one
    ups = torch.stack([rounded(torch.full((n,), value), c).abs() > 1 for c in range(counts)])
    bound = 5 * math.sqrt(fraction * (1 - fraction) / ups.numel())
    assert bound < 0.01
    assert abs(ups.double().mean().item() - fraction) < bound
    # Each position over the counters, and each counter over the positions, is fair too.
    assert (ups.double().mean(1) - fraction).abs().max() < 5 * math.sqrt(
        fraction * (1 - fraction) / n
    )


def test_the_mean_is_right_at_the_ends_of_the_interval():
    """The last of the 16 dropped bits counts: a fraction of 2⁻¹⁶ goes up about once in 2¹⁶."""
    n = 2**20
    assert (rounded(torch.ones(n)) == 1).all()  # and a fraction of zero never does
    value = torch.tensor(1.0).view(torch.int32).add(1).view(torch.float32)
    ups = (rounded(value.expand(n)) > 1).sum().item()
    assert abs(ups - 16) < 5 * math.sqrt(16)
    value = torch.tensor(1.0).view(torch.int32).add(0xFFFF).view(torch.float32)
    downs = (rounded(value.expand(n)) == 1).sum().item()
    assert abs(downs - 16) < 5 * math.sqrt(16)


def test_special_values():
    exact = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.0**-133, -(2.0**-133)])
    for count in range(50):
        got = rounded(exact, count)
        assert torch.equal(got.float(), exact)
        assert torch.equal(got.signbit(), exact.signbit())  # zeros keep their sign
    # a quarter of the way up between zero and the smallest subnormal, 2⁻¹³³
    subnormal = torch.full((4096,), 2.0**-135)
    ups = rounded(subnormal)
    assert set(ups.float().tolist()) == {0.0, 2.0**-133}
    assert abs((ups > 0).double().mean().item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4096)
    # above the largest bf16 number the neighbour is infinity, as in rounding to nearest
    largest = torch.finfo(torch.float32).max
    assert set(rounded(torch.full((64,), largest)).float().tolist()) <= {
        torch.finfo(torch.bfloat16).max,
        math.inf,
    }


@pytest.mark.parametrize(
    "bits", [0x7FC00000, -0x400000, 0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF], ids=hex
)
def test_nan_stays_nan(bits):
    """Whatever its bits: CUDA's guide gives 0x7fffffff for computed ones, x86 has 0xffc00000."""
    nan = torch.full((256,), bits, dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all()
    assert rounded(nan).isnan().all()


def test_other_shapes_and_layouts():
    wide = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    expected = rounded(wide)
    last = wide.to(memory_format=torch.channels_last)
    narrow = torch.empty_like(last, dtype=torch.bfloat16)
    stochastic_round_(narrow, last, counter())
    assert not narrow.is_contiguous()
    assert torch.equal(narrow, expected)
    assert rounded(torch.tensor(1.5)).item() == 1.5
    assert rounded(torch.empty(0, 3)).shape == (0, 3)
    double = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(rounded(double), rounded(double.float()))


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].item()


@pytest.mark.parametrize("size", [64, 4096])
def test_noise_differs_between_counters_and_positions(size):
    like = torch.empty(size)
    counts = [*range(8), 12345, 12346, 2**31 - 1, -(2**31), -1]
    noises = [hash_noise(like, counter(c)) for c in counts]
    bound = 5 / math.sqrt(size)  # standard deviation of the correlation of independent noise
    for i, noise in enumerate(noises):
        assert ((noise >= 0) & (noise < 2**16)).all()
        assert abs(correlation(noise[:-1], noise[1:])) < bound
        assert len(noise.unique()) > 0.9 * size
        for other in noises[:i]:
            assert not torch.equal(noise, other)
            assert abs(correlation(noise, other)) < bound


def test_one_counter_for_each_row():
    """A row has the noise of its own counter, whatever stands beside it."""
    counters = torch.tensor([3, -7, 2**31 - 1], dtype=torch.int32)
    noise = hash_noise(torch.empty(3, 4, 5), counters)
    for row, count in zip(noise, counters, strict=True):
        assert torch.equal(row, hash_noise(torch.empty(4, 5), count))
    wide = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    narrow = torch.empty(3, 4, 5, dtype=torch.bfloat16)
    stochastic_round_(narrow, wide, counters)
    for row, alone, count in zip(narrow, wide, counters, strict=True):
        assert torch.equal(row, rounded(alone, int(count)))


def test_noise_is_uniform():
    """χ² over 256 bins: 255 degrees of freedom, standard deviation √510."""
    n = 2**18
    for shift in (8, 0):  # the upper and the lower byte of the 16 bits
        bins = (hash_noise(torch.empty(n), counter(7)) >> shift & 0xFF).bincount(minlength=256)
        chi2 = ((bins - n / 256) ** 2 / (n / 256)).sum().item()
        assert abs(chi2 - 255) < 5 * math.sqrt(510)


def test_noise_is_repeatable():
    like = torch.empty(5, 7)
    assert torch.equal(hash_noise(like, counter(3)), hash_noise(like, counter(3)))


def moving_average(state: Tensor, *, target: float, beta: float, steps: int, stochastic: bool):
    """state <- (1-β) state + β target, kept in bfloat16."""
    counters = [counter()] if stochastic else []
    for _ in range(steps):
        with widened([state], torch.float32, counters) as (wide,):
            wide.lerp_(torch.full_like(wide, target), beta)
    return state.float()


def test_a_slow_moving_average_freezes_when_rounded_to_nearest_and_follows_when_stochastic():
    """β = 0.005 from 1.25 towards 0.5: the first change, 0.00375, is below half a bf16 step."""
    beta, steps, n = 0.005, 300, 1024
    assert beta * (1.25 - 0.5) < 2**-8
    start = torch.full((n,), 1.25, dtype=torch.bfloat16)
    expected = 0.5 + 0.75 * (1 - beta) ** steps
    nearest = moving_average(start.clone(), target=0.5, beta=beta, steps=steps, stochastic=False)
    assert torch.equal(nearest, start.float())  # never moved
    followed = moving_average(start.clone(), target=0.5, beta=beta, steps=steps, stochastic=True)
    # One rounding is off by at most 2⁻⁷ (values below 2), variance at most 2⁻¹⁴/4; the average
    # forgets, so their sum has variance below 2⁻¹⁶/(1-(1-β)²) = (0.039)² for an element and √n
    # less for the mean.
    deviation = math.sqrt(2**-16 / (1 - (1 - beta) ** 2))
    assert (followed - expected).abs().max() < 5 * deviation
    assert abs(followed.mean().item() - expected) < 5 * deviation / math.sqrt(n)
    assert abs(followed.mean().item() / expected - 1) < 0.03


def test_the_optimizer_state_in_bf16_follows_the_one_in_float32():
    """The same trap in the optimizer: s from 1 towards B g² = 0.25 at β₂ = 0.005."""
    runs = {}
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(torch.zeros(1024))
        optimizer = rootfree.RFRMSprop(
            [p], lr=0.0, batch_size=4, precond_lr=0.005, state_dtype=dtype
        )
        for _ in range(200):
            p.grad = torch.full_like(p, 0.25)
            optimizer.step()
        assert optimizer.state[p]["preconditioner"].dtype == dtype
        runs[dtype] = optimizer.state[p]["preconditioner"].float()
    moved = 1 - runs[torch.float32].mean()
    assert moved > 0.4
    assert (runs[torch.bfloat16].mean() - runs[torch.float32].mean()).abs() < 0.02 * moved


def test_widened_hands_wide_tensors_through_and_advances_the_counters():
    wide, count = torch.ones(3), counter(5)
    with widened([wide], torch.float32, [count]) as (same,):
        assert same is wide
    assert count == 5
    narrow = torch.ones(3, dtype=torch.bfloat16)
    with widened([narrow], torch.float32, [count]) as (copy,):
        assert copy.dtype == torch.float32
        copy.fill_(3.0)
    assert count == 6
    assert narrow.tolist() == [3.0] * 3
    with widened([], torch.float32, []) as nothing:
        assert nothing == []


# Regression: with int32 arithmetic throughout, the compiler's CPU code got the elements behind the
# last full vector wrong. No full vector, no tail, and tails for vectors of 8 and 16.
@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 32, 36, 1000])
def test_compiled_equals_eager(size):
    torch._dynamo.reset()
    wide = torch.randn(size, generator=torch.Generator().manual_seed(size))
    compiled = torch.compile(stochastic_round_, dynamic=False)
    for count in (0, 1, 2**31 - 1):
        narrow = torch.empty(size, dtype=torch.bfloat16)
        compiled(narrow, wide, counter(count))
        assert torch.equal(narrow, rounded(wide, count))


@pytest.mark.slow
def test_compiled_noise_of_a_matrix_equals_eager():
    torch._dynamo.reset()
    for shape in ((4, 9), (5, 8), (3, 3, 4)):
        compiled = torch.compile(hash_noise, dynamic=False)(torch.empty(shape), counter(11))
        assert torch.equal(compiled, hash_noise(torch.empty(shape), counter(11)))
