"""Gathering gradients into a stack, and the tail of the step, against buckets and rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.devices import DEVICE, close, normal, unaligned
from rootfree.layout.buckets import Bucket, Slot
from rootfree.layout.structured import structured_tiles
from rootfree.kernels.fused_stack import FusedBlocks
from rootfree.kernels.rounding import widened
from rootfree.rules.momentum import cap_rms_, heavy_ball_

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Blocks of 16: whole parameters, blocks inside larger ones (strided), three axes, odd sizes, and
# aligned ones; (16, 16) and the blocks of (16, 32) share a bucket.
SHAPES = [(16, 16), (16, 32), (5, 7), (3, 18, 3, 2), (40,), (17, 9)]
EVEN = [(16, 32), (32, 64), (64,)]


def parameters(shapes, dtype=FP32) -> list[Tensor]:
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def gradients(ps, dtype=None) -> list[Tensor]:
    return [normal(*p.shape, seed=100 + i, dtype=dtype or p.dtype) for i, p in enumerate(ps)]


def buckets_of(ps: list[Tensor], block_size: int = 16) -> list[Bucket]:
    buckets: dict = {}
    for p in ps:
        tiles = structured_tiles(tuple(p.shape), structure="dense", block_size=block_size)
        for i, (tile, structures) in enumerate(tiles):
            bucket = buckets.setdefault(tile.sizes, Bucket(structures))
            bucket.slots.append(Slot(p, tile, f"block{i}."))
    return list(buckets.values())


def check_gather(ps, gs, *, dtype, members=None) -> None:
    buckets = buckets_of(ps)
    present = ps if members is None else [ps[i] for i in members]
    given = gs if members is None else [gs[i] for i in members]
    buckets = [b for b in buckets if any(slot.p is p for slot in b.slots for p in present)]
    kernel = FusedBlocks()
    stack = kernel.stack(present, buckets)
    for squares in (True, False):
        kernel.gather_(stack, given, dtype=dtype, squares=squares)
        for bucket, part, sums in stack.parts():
            expected = bucket.gather(dict(zip(present, given, strict=True)), dtype=dtype)
            assert torch.equal(part, expected)
            if squares:
                exact = bucket.gather(dict(zip(present, given, strict=True)), dtype=FP64)
                close(sums.sum(1), exact.flatten(1).square().sum(1), rtol=1e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("grad", [FP32, BF16, FP16])
def test_gather_equals_the_bucket(grad, dtype):
    ps = parameters(SHAPES, grad)
    check_gather(ps, gradients(ps), dtype=dtype)


def test_gather_where_eight_numbers_are_read_at_once():
    ps = parameters(EVEN)
    check_gather(ps, gradients(ps), dtype=BF16)


def test_gather_leaves_out_what_has_no_gradient():
    ps = parameters(SHAPES)
    check_gather(ps, gradients(ps), dtype=FP32, members=[1, 3, 5])


def test_gather_from_memory_that_starts_anywhere():
    ps = parameters(EVEN)
    check_gather(ps, [unaligned(g) for g in gradients(ps)], dtype=FP32)


def test_gather_from_other_layouts():
    ps = parameters([(6, 3, 4, 2), (5, 7)])
    gs = gradients(ps)
    gs = [gs[0].to(memory_format=torch.channels_last), gs[1].t().contiguous().t()]
    check_gather(ps, gs, dtype=FP32)


def test_gather_from_several_dtypes():
    ps = parameters([(5, 7), (9, 4)])
    check_gather(ps, [normal(5, 7, dtype=BF16), normal(9, 4)], dtype=FP32)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_beyond_the_range_of_fp32(scale):
    ps = parameters([(16, 32), (5, 7)])
    check_gather(ps, [g * scale for g in gradients(ps)], dtype=FP32)


def check_tail(
    ps, *, values=FP32, momentum=FP32, lr=0.1, kappa=0.01, cap=0.5, scale=1.0, layout=None
) -> None:
    layout = layout or (lambda t: t)
    ps = [layout(p) for p in ps]
    buckets = buckets_of(ps)
    kernel, stack = FusedBlocks(), None
    ms = [] if momentum is None else [layout(normal(*p.shape, seed=9).to(momentum)) for p in ps]
    bf16 = momentum == BF16
    counters = [torch.tensor(i, dtype=torch.int32, device=DEVICE) for i in range(len(ps))]
    counters = counters if bf16 else []
    expected = [[t.clone() for t in kind] for kind in (ps, ms, counters)]
    us = [scale * (i + 1) * g.float() for i, g in enumerate(gradients(ps))]
    stack = kernel.stack(ps, buckets)
    kernel.gather_(stack, us, dtype=values, squares=False)
    rates = {"lr": lr, "alpha1": 0.9, "kappa": kappa}
    kernel.descend_(stack, ps, ms, counters, cap=cap, **rates)
    # The rule, from the same directions in the same precision.
    us = [u.to(values).float() for u in us]
    if cap is not None:
        cap_rms_(us, cap=cap)
    # In fp32, and rounded once, as in the kernel.
    updated = [p.float() for p in expected[0]]
    with widened(expected[1], FP32, expected[2]) as wide:
        heavy_ball_(updated, wide, us, **rates)
    expected[0] = [u.to(p.dtype) for u, p in zip(updated, ps, strict=True)]
    for got, want in zip((ps, ms, counters), expected, strict=True):
        for g, w in zip(got, want, strict=True):
            error = (g.double() - w.double()).abs()
            eps = torch.finfo(g.dtype).eps if g.is_floating_point() else 0.0
            assert (error <= 2 * eps * w.double().abs() + 5e-6 * scale).all()
            # A bf16 number may go to the other neighbour where rounding was undecided.
            assert (error > 1e-5 * (w.double().abs() + scale)).sum() <= 1 + 0.01 * g.numel()


@pytest.mark.parametrize("momentum", [FP32, BF16, FP64, None])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_tail_equals_the_rule(dtype, momentum):
    check_tail(parameters(SHAPES, dtype), momentum=momentum)


def test_tail_where_eight_numbers_are_read_at_once():
    check_tail(parameters(EVEN), values=BF16)


def test_tail_in_fp16():
    check_tail(parameters([(5, 7), (16, 32)], FP16))


@pytest.mark.parametrize("momentum", [FP32, BF16])
def test_tail_of_other_layouts(momentum):
    check_tail(
        parameters([(6, 3, 4, 2), (8, 8, 2, 2)]),
        momentum=momentum,
        layout=lambda t: t.to(memory_format=torch.channels_last),
    )


def test_tail_of_memory_that_starts_anywhere():
    check_tail(parameters(EVEN), layout=unaligned)


@pytest.mark.parametrize(
    "options",
    [
        {"cap": None},
        {"cap": 100.0},  # larger than every direction
        {"kappa": 0.0},
        {"lr": torch.tensor(0.1)},
        {"lr": torch.tensor(0.1, device=DEVICE, dtype=FP64)},
        {"scale": 1e10, "cap": 1e9},
    ],
    ids=str,
)
def test_tail_with_options(options):
    check_tail(parameters([(5, 7), (16, 32)]), **options)


def test_a_zero_direction_is_no_division_by_zero():
    ps = parameters([(5, 7)])
    before = ps[0].clone()
    kernel = FusedBlocks()
    stack = kernel.stack(ps, buckets_of(ps))
    kernel.gather_(stack, [torch.zeros_like(ps[0])], dtype=FP32, squares=False)
    kernel.descend_(stack, ps, [], [], lr=0.1, alpha1=0.0, kappa=0.0, cap=1.0)
    assert torch.equal(ps[0], before)


def test_counters_stand_still_where_nothing_was_rounded():
    """No momentum, so no bf16 number was written."""
    ps = parameters([(5, 7)])
    counters = [torch.tensor(5, dtype=torch.int32, device=DEVICE)]
    kernel = FusedBlocks()
    stack = kernel.stack(ps, buckets_of(ps))
    kernel.gather_(stack, gradients(ps), dtype=FP32, squares=False)
    kernel.descend_(stack, ps, [], counters, lr=0.1, alpha1=0.0, kappa=0.0, cap=None)
    assert counters[0] == 5
