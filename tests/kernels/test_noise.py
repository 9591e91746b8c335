"""Rounding inside kernels: bit for bit that of rootfree/rounding.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.devices import DEVICE, normal, run, zeros
from rootfree.kernels.rounding import stochastic_round_

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from rootfree.kernels.triton_shared import round_stochastically  # noqa: E402


@triton.jit
def rounding_kernel(x, out, counter, first, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, at < size, 0.0)
    index = tl.load(first) + at
    tl.store(out + at, round_stochastically(value, index, tl.load(counter)), at < size)


def rounded(x: torch.Tensor, count: int, first: int = 0) -> torch.Tensor:
    out = zeros(len(x), dtype=torch.bfloat16)
    counter = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    start = torch.tensor([first], dtype=torch.int64, device=DEVICE)
    run(rounding_kernel, 1, x, out, counter, start, len(x), BLOCK=512)
    return out


def by_rule(x: torch.Tensor, count: int) -> torch.Tensor:
    narrow = torch.empty_like(x, dtype=torch.bfloat16)
    stochastic_round_(narrow, x, torch.tensor(count, dtype=torch.int32, device=DEVICE))
    return narrow


def bits(t: torch.Tensor) -> list[int]:
    return t.view(torch.int16).tolist()


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(-(2**31), 2**31 - 1),
    exponent=st.integers(-35, 35),
)
def test_the_same_bits(seed, count, exponent):
    x = normal(511, seed=seed) * 10.0**exponent
    assert bits(rounded(x, count)) == bits(by_rule(x, count))


def test_numbers_that_are_none():
    x = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, 3.4e38], device=DEVICE)
    assert bits(rounded(x, 5)) == bits(by_rule(x, 5))
    assert rounded(torch.full((512,), float("nan"), device=DEVICE), 3).isnan().all()


def test_the_noise_of_a_part_is_that_of_the_whole():
    x = normal(500)
    assert bits(rounded(x[100:].contiguous(), 7, first=100)) == bits(by_rule(x, 7))[100:]
