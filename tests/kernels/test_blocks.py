"""Gathering gradients into a stack, and the tail of the step, against tiles and rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.devices import DEVICE, close, normal, unaligned
from kernels.stacks import PLAIN, RATES, buckets_of, by_rule, gradients, parameters
from rootfree.kernels.fused_stack import FusedStack
from rootfree.kernels.stack import Stack
from rootfree.layout.joint import JointPairs
from rootfree.rules import LARGEST_GRADIENT

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Blocks of 16: whole parameters, blocks inside larger ones (strided), three axes, odd sizes, and
# aligned ones; (16, 16) and the blocks of (16, 32) share a bucket.
SHAPES = [(16, 16), (16, 32), (5, 7), (3, 18, 3, 2), (40,), (17, 9)]
EVEN = [(16, 32), (32, 64), (64,)]


def expected_blocks(part, grads: dict[Tensor, Tensor], dtype) -> Tensor:
    """The blocks of a part, by the views of their tiles."""
    slots = part.share.slots
    grids = [slot.tile.grid(grads[slot.p]).flatten(0, len(slot.tile.counts) - 1) for slot in slots]
    blocks = torch.cat(grids).double().clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT)
    return blocks.to(dtype)


def check_gather(ps, gs, *, dtype, members=None) -> None:
    present = ps if members is None else [ps[i] for i in members]
    given = gs if members is None else [gs[i] for i in members]
    grads = dict(zip(present, given, strict=True))
    buckets = buckets_of(ps, dtype)
    stack, twin = FusedStack(present, buckets, None), Stack(present, buckets, wide=FP32)
    for squares in (True, False):
        for each in (stack, twin):
            each.gather_(given, squares=squares)
        parts, its = ([*each.parts()] for each in (stack, twin))
        assert {slot.p for part in parts for slot in part.share.slots} == set(present)
        for part, other in zip(parts, its, strict=True):
            expected = expected_blocks(part, grads, dtype)
            assert torch.equal(part.G, expected)
            assert torch.equal(other.G, expected)
            if squares:
                exact = expected_blocks(part, grads, FP64)
                close(part.squares.sum(1), exact.flatten(1).square().sum(1), rtol=1e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("grad", [FP32, BF16, FP16])
def test_gather_equals_the_tiles(grad, dtype):
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


@pytest.mark.parametrize("scale", [1e-30, 1e18, 1e30])
def test_squares_beyond_the_range_of_fp32(scale):
    ps = parameters([(16, 32), (5, 7)])
    check_gather(ps, [g * scale for g in gradients(ps)], dtype=FP32)


# -- joint pairs -----------------------------------------------------------------------------


def joint_stacks(shape, missing: str):
    """Stacks, kernels and torch, of a weight with its bias and another parameter."""
    weight, bias, other = parameters([shape, shape[:1], (16, 16)])
    pairs = JointPairs([(weight, bias)])
    names = {"weight": weight, "bias": bias, "other": other}
    present = [p for name, p in names.items() if name != missing]
    buckets = buckets_of([weight, bias, other], FP32, pairs=pairs)
    stacks = FusedStack(present, buckets, None), Stack(present, buckets, wide=FP32)
    return weight, bias, present, stacks


@pytest.mark.parametrize("missing", ["nothing", "weight", "bias"])
@pytest.mark.parametrize("shape", [(16, 15), (20, 3, 2, 3), (5, 40)], ids=str)
def test_a_weight_and_its_bias_are_one_matrix(shape, missing):
    """What has no gradient is zero in the stack, at every step."""
    weight, bias, present, stacks = joint_stacks(shape, missing)
    for step in range(2):
        grads = {p: normal(*p.shape, seed=50 + step + i) for i, p in enumerate(present)}
        whole = [grads.get(p, torch.zeros_like(p)) for p in (weight, bias)]
        matrix = torch.cat([whole[0].flatten(1), whole[1][:, None]], 1)
        for stack in stacks:
            stack.gather_([grads[p] for p in present], squares=True)
            seen = 0
            for part in stack.parts():
                slots = [slot for slot in part.share.slots if slot.p is weight]
                if slots:
                    found = {**grads, weight: matrix}
                    blocks = expected_blocks(part, found, FP32)
                    assert torch.equal(part.G, blocks)
                    seen += len(slots)
                    if part.squares is not None:
                        exact = blocks.double().flatten(1).square().sum(1)
                        close(part.squares.sum(1), exact, rtol=1e-6, atol=1e-12)
            assert seen > 0


@pytest.mark.parametrize("missing", ["nothing", "weight", "bias"])
def test_the_tail_of_a_weight_and_its_bias(missing):
    tail = PLAIN._replace(kappa=0.01, cap=0.3, rms=0.2)
    weight, bias, present, stacks = joint_stacks((20, 18), missing)
    start = [p.clone() for p in (weight, bias, *present)]
    us = [normal(*p.shape, seed=60 + i) for i, p in enumerate(present)]
    results = []
    for stack in stacks:
        ms = [normal(*p.shape, seed=70 + i) for i, p in enumerate(present)]
        with torch.no_grad():
            for p, before in zip((weight, bias, *present), start, strict=True):
                p.copy_(before)
        if isinstance(stack, FusedStack):
            stack.send(tail, RATES)
        stack.gather_(us, squares=False)
        for part in stack.parts():
            stack.keep_(part, refresh=False)  # directions are the gradients
        stack.descend_(ms, [], tail)
        results.append([t.clone() for t in (weight, bias, *present, *ms)])
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    gone = {"weight": 0, "bias": 1}.get(missing)
    for i in range(2):
        assert torch.equal(results[0][i], start[i]) == (i == gone)


# -- the tail --------------------------------------------------------------------------------


def check_tail(ps, *, values=FP32, momentum=FP32, scale=1.0, layout=None, **options) -> None:
    tail = PLAIN._replace(**{"kappa": 0.01, "cap": 0.5, **options})
    layout = layout or (lambda t: t)
    ps = [layout(p) for p in ps]
    ms = [] if momentum is None else [layout(normal(*p.shape, seed=9).to(momentum)) for p in ps]
    counters = [torch.tensor(i, dtype=torch.int32, device=DEVICE) for i in range(len(ps))]
    counters = counters if momentum == BF16 else []
    expected = [[t.clone() for t in kind] for kind in (ps, ms, counters)]
    us = [scale * (i + 1) * g.float() for i, g in enumerate(gradients(ps))]
    stack = FusedStack(ps, buckets_of(ps, values), None)
    stack.send(tail, RATES)
    stack.gather_(us, squares=False)
    stack.descend_(ms, counters, tail)
    # The rule, from the same directions in the same precision.
    expected[0] = by_rule(*expected, [u.to(values).float() for u in us], tail)
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


EVERYTHING = {"rms": 0.2, "nesterov": True, "kappa": 0.1}


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=str)
@pytest.mark.parametrize("momentum", [FP32, BF16])
def test_tail_of_other_layouts(momentum, options):
    check_tail(
        parameters([(6, 3, 4, 2), (8, 8, 2, 2)]),
        momentum=momentum,
        layout=lambda t: t.to(memory_format=torch.channels_last),
        **options,
    )


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=str)
def test_tail_of_memory_that_starts_anywhere(options):
    check_tail(parameters(EVEN), layout=unaligned, **options)


DECOUPLED = {"decoupled": True, "kappa": 0.1}


@pytest.mark.parametrize(
    "options",
    [
        {"cap": None},
        {"cap": 100.0},  # larger than every direction
        {"kappa": 0.0},
        {"lr": torch.tensor(0.1)},
        {"lr": torch.tensor(0.1, device=DEVICE, dtype=FP64)},
        {"scale": 1e10, "cap": 1e9},
        {"cap": None, "rms": 0.2},
        {"cap": None, "rms": 0.2, "momentum": None},
        {"rms": 0.2, "decoupled": True, "kappa": 0.1, "momentum": BF16},
        {"nesterov": True, "cap": None},
        {"nesterov": True, "kappa": 0.1},
        {"nesterov": True, "momentum": None},  # without momentum there is none
        DECOUPLED,
        {**DECOUPLED, "momentum": None},
        {**DECOUPLED, "lr": torch.tensor(0.1, device=DEVICE)},
        {"cap": 0.3, "rms": 0.2, "nesterov": True},
        {**DECOUPLED, "momentum": BF16, "nesterov": True},
        {**EVERYTHING, **DECOUPLED, "lr": torch.tensor(0.1), "momentum": BF16},
    ],
    ids=str,
)
@pytest.mark.parametrize("shapes", [[(5, 7), (16, 32)], EVEN], ids=["odd", "even"])
def test_tail_with_options(options, shapes):
    check_tail(parameters(shapes), **options)


@pytest.mark.parametrize(
    "change",
    [{"cap": None, "rms": 0.4}, {"nesterov": True}, {"kappa": 0.5}, {"cap": 0.1}, DECOUPLED],
    ids=str,
)
def test_the_tolerance_tells_tails_apart(change):
    """What `check_tail` allows is less than what an option changes."""
    ps = parameters([(5, 7)])
    base = PLAIN._replace(kappa=0.01, cap=0.5)
    results = []
    for tail in (base, base._replace(**change)):
        mine = [p.clone() for p in ps]
        results.append(by_rule(mine, [normal(5, 7, seed=9)], [], gradients(ps), tail)[0])
    assert (results[0] - results[1]).abs().amax() > 1e-3


def descended(ps, us, tail, *, values=FP32, ms=()) -> list[Tensor]:
    stack = FusedStack(ps, buckets_of(ps, values), None)
    stack.send(tail, RATES)
    stack.gather_(us, squares=False)
    stack.descend_(list(ms), [], tail)
    return ps


@pytest.mark.parametrize("values", [FP32, BF16])
@pytest.mark.parametrize("entry", [1e20, -1e20, float("inf"), -float("inf")])
@pytest.mark.parametrize("rms", [None, 0.2])
def test_directions_without_measure_are_scaled_to_the_cap(values, entry, rms):
    tail = PLAIN._replace(cap=0.5, rms=rms)
    ps, other = parameters([(5, 7), (16, 16)]), parameters([(5, 7), (16, 16)])
    before = [p.clone() for p in ps]
    us = [u.to(values).float() for u in gradients(ps)]
    us[0][2, 3] = entry
    descended(ps, us, tail, values=values)
    us = [u.to(values).float() for u in us]
    other = by_rule(other, [], [], us, tail)
    for p, q, start in zip(ps, other, before, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
        moved = (p - start).square().mean().sqrt().item()
        assert moved == pytest.approx(0.1 * (rms or 0.5), rel=1e-4)


@pytest.mark.parametrize("options", [{"cap": 0.5}, {"rms": 0.2}, {"cap": 0.5, "rms": 0.2}, {}])
def test_not_a_number_stays_one(options):
    """As in the rule, also for the numbers beside it; another parameter does not notice."""
    tail = PLAIN._replace(**options)
    ps, us = parameters([(5, 7), (16, 16)]), gradients(parameters([(5, 7), (16, 16)]))
    us[0][2, 3] = float("nan")
    other = by_rule([p.clone() for p in ps], [], [], [u.clone() for u in us], tail)
    descended(ps, us, tail)
    assert ps[0][2, 3].isnan()
    for p, q in zip(ps, other, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("options", [{"cap": 1.0}, {"rms": 0.2}, {"cap": 1.0, "rms": 0.2}])
def test_a_zero_direction_is_no_division_by_zero(options, momentum):
    ps = parameters([(5, 7)])
    before = ps[0].clone()
    ms = [torch.zeros_like(ps[0])] if momentum else []
    descended(ps, [torch.zeros_like(ps[0])], PLAIN._replace(**options), ms=ms)
    assert torch.equal(ps[0], before)
    assert not any(m.any() for m in ms)


def test_numbers_come_from_the_table():
    """A recorded tail follows what is sent later."""
    tail = PLAIN._replace(kappa=0.1, cap=0.5, rms=0.2)
    ps, other = parameters([(5, 7)]), parameters([(5, 7)])
    us, ms, its = gradients(ps), [normal(5, 7, seed=9)], [normal(5, 7, seed=9)]
    stack = FusedStack(ps, buckets_of(ps, FP32), None)
    stack.gather_(us, squares=False)
    later = tail._replace(lr=0.3, alpha1=0.5, kappa=0.2, cap=0.25, rms=0.4)
    stack.send(later, RATES)
    stack.descend_(ms, [], tail)
    torch.testing.assert_close(ps, by_rule(other, its, [], us, later), rtol=1e-5, atol=1e-6)


def test_counters_stand_still_where_nothing_was_rounded():
    """No momentum, so no bf16 number was written."""
    ps = parameters([(5, 7)])
    counters = [torch.tensor(5, dtype=torch.int32, device=DEVICE)]
    stack = FusedStack(ps, buckets_of(ps, FP32), None)
    stack.send(PLAIN, RATES)
    stack.gather_(gradients(ps), squares=False)
    stack.descend_([], counters, PLAIN)
    assert counters[0] == 5


def test_autograd_learns_of_the_change():
    p = torch.nn.Parameter(parameters([(5, 7)])[0])
    y = (p * p).sum()
    with torch.no_grad():
        descended([p], gradients([p]), PLAIN)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
