"""The fused pass of the diagonal methods against rules/diagonal.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import rootfree
from kernels.devices import DEVICE, normal, unaligned
from rootfree.kernels.diagonal import CHUNK, FusedDiagonal
from rootfree.kernels.rounding import widened
from rootfree.rules.diagonal import (
    accumulate_squares_,
    ahead,
    average_,
    limited_for_average,
    limits_of_averages,
    preconditioned_descent_,
    preconditioned_heavy_ball_,
    start_rate,
)
from rootfree.rules.momentum import Tail, decay_
from rootfree.shell.gradients import find_work

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(), (1,), (7,), (CHUNK - 1,), (CHUNK + 3,), (3, 5, 2, 2)]
BETA2, B, LAM, KAPPA, LR = 0.125, 8, 0.25, 0.01, 0.1
# Of SHAPES: 5/(t + 6) is a power of two at 4, 14 and 34; from 34 on it is at most β₂.
COUNTS = [4, 14, 34, 35, 14, 4]


@dataclass
class Lists:
    """What a step reads and changes."""

    ps: list[Tensor]
    gs: list[Tensor]
    ss: list[Tensor]
    ms: list[Tensor]
    counters: list[Tensor]
    steps: list[Tensor] = field(default_factory=list)  # counts, of a fast start
    options: dict = field(default_factory=dict)

    def clone(self) -> Lists:
        copied = [
            [t.clone(memory_format=torch.preserve_format) for t in kind] for kind in self.kinds
        ]
        return Lists(*copied, options=self.options)

    @property
    def kinds(self) -> list[list[Tensor]]:
        return [self.ps, self.gs, self.ss, self.ms, self.counters, self.steps]

    def changed_from(self, other: Lists) -> bool:
        return any(
            not torch.equal(a, b)
            for mine, its in zip(self.kinds, other.kinds, strict=True)
            for a, b in zip(mine, its, strict=True)
        )


def lists(
    shapes=SHAPES, *, dtype=FP32, grad=None, state=FP32, momentum=True, gamma=1.0, seed=0,
    nesterov=False, decoupled=False, clip=None, fast=False,
):  # fmt: skip
    """Random ones. Squares of gradients and preconditioners are exact in fp32: k/8 and k/16."""
    ps = [normal(*s, seed=seed + i).to(dtype) for i, s in enumerate(shapes)]
    gs = [(normal(*s, seed=seed + 50 + i) * 8).round().div(8) for i, s in enumerate(shapes)]
    ss = [(normal(*s, seed=seed + 70 + i).abs() * 16).round().div(16) for i, s in enumerate(shapes)]
    ms = [normal(*s, seed=seed + 90 + i).to(state) for i, s in enumerate(shapes)]
    counters = [torch.tensor(7 * i - 3, dtype=torch.int32, device=DEVICE) for i in range(len(ps))]
    return Lists(
        ps,
        [g.to(grad or dtype) for g in gs],
        [s.to(state) for s in ss],
        ms if momentum else [],
        counters if state == BF16 else [],
        [torch.tensor(t, device=DEVICE) for t in COUNTS] if fast else [],
        {"gamma": gamma, "tail": Tail(LR, 0.9, KAPPA, nesterov, decoupled, clip=clip)},
    )


def fused(update: str, x: Lists, kernel: FusedDiagonal | None = None) -> bool:
    kernel, tail = kernel or FusedDiagonal(x.ps), x.options["tail"]
    kernel.send(tail, beta2=BETA2, gamma=x.options["gamma"], B=B, lam=LAM)
    done = kernel.update_(update, x.gs, x.ss, x.ms, x.counters, x.steps, tail)
    assert kernel.fits == done
    return done


def by_rule(update: str, x: Lists) -> None:
    gs = [g.float() for g in x.gs]
    rate = start_rate(torch.stack(x.steps).float(), BETA2) if x.steps else BETA2
    squares = {"beta2": rate, "B": B, "gamma": x.options["gamma"]}
    tail = x.options["tail"]
    if update == "heavy_ball":
        with widened(x.ss, FP32, x.counters) as ss:
            accumulate_squares_(ss, gs, **squares)
        with widened(x.ms, FP32, x.counters) as ms:
            preconditioned_heavy_ball_(x.ps, ms, gs, ss, lam=LAM, tail=tail)
    else:
        with widened(x.ss, FP32, x.counters) as ss:
            accumulate_squares_(ss, gs, **squares)
        with widened(x.ms, FP32, x.counters) as ms:
            within = gs if tail.clip is None else limited_for_average(gs, ss, lam=LAM, c=tail.clip)
            if x.steps and tail.clip is not None:
                cs = limits_of_averages(rate, beta2=BETA2, c=tail.clip)
                torch._foreach_copy_(ms, limited_for_average(ms, ss, lam=LAM, c=cs))
            average_(ms, within, alpha=tail.alpha1)
            ns = ahead(ms, within, alpha=tail.alpha1) if tail.nesterov else ms
        decay_(x.ps, lr=tail.lr, kappa=tail.kappa)
        preconditioned_descent_(x.ps, ns, ss, lam=LAM, lr=tail.lr)


def assert_alike(got: Lists, expected: Lists) -> None:
    for g, e in zip(got.counters, expected.counters, strict=True):
        assert torch.equal(g, e)
    for g, e in zip(got.ss, expected.ss, strict=True):
        assert torch.equal(g, e), "squares are exact, and rounded with the same noise"
    for got_kind, expected_kind in ((got.ps, expected.ps), (got.ms, expected.ms)):
        for g, e in zip(got_kind, expected_kind, strict=True):
            eps = torch.finfo(g.dtype).eps
            error = (g.double() - e.double()).abs()
            # The last bits of fp32 differ; in fewer bits that shows where rounding was undecided.
            assert (error <= 2 * eps * e.double().abs() + 1e-6).all()
            assert (error > 1e-5 * (1 + e.double().abs())).sum() <= 1 + 0.01 * g.numel()


def check(update: str, x: Lists, steps: int = 2) -> None:
    kernel = FusedDiagonal(x.ps)
    for _ in range(steps):
        before, other = x.clone(), x.clone()
        assert fused(update, x, kernel)
        assert x.changed_from(before)
        # In fp32, and rounded once, as in the kernel.
        other.ps = [p.float() for p in other.ps]
        by_rule(update, other)
        other.ps = [e.to(p.dtype) for e, p in zip(other.ps, x.ps, strict=True)]
        assert_alike(x, other)


METHODS = {
    "rmsprop": ("heavy_ball", {}),
    "rmsprop-plain": ("heavy_ball", {"momentum": False}),
    "adagrad": ("heavy_ball", {"gamma": 0.0}),
    "nesterov": ("heavy_ball", {"nesterov": True}),
    "decoupled": ("heavy_ball", {"decoupled": True}),
    "decoupled-plain": ("heavy_ball", {"decoupled": True, "momentum": False}),
    "nesterov-decoupled": ("heavy_ball", {"nesterov": True, "decoupled": True}),
    "clipped": ("heavy_ball", {"clip": 0.3}),
    "clipped-plain": ("heavy_ball", {"clip": 0.3, "momentum": False}),
    "adamw": ("averaged", {}),
    "adamw-clipped": ("averaged", {"clip": 0.3}),
    "adamw-nesterov": ("averaged", {"nesterov": True, "clip": 0.3}),
    "fast": ("heavy_ball", {"fast": True}),
    "adamw-fast": ("averaged", {"fast": True, "clip": 0.3}),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("state", [FP32, BF16])
def test_equals_the_rule(method, dtype, state):
    update, options = METHODS[method]
    check(update, lists(dtype=dtype, state=state, **options), steps=1)


@pytest.mark.parametrize("grad", [BF16, FP16, FP64])
def test_gradients_of_another_dtype(grad):
    check("heavy_ball", lists([(3,), (5, 7)], grad=grad))


def test_state_in_double_precision_around_fp32_parameters():
    check("averaged", lists([(3,), (5, 7)], state=FP64))


def with_tail(x: Lists, **changes) -> Lists:
    x.options["tail"] = x.options["tail"]._replace(**changes)
    return x


@pytest.mark.parametrize("state", [FP32, BF16])
@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("update", ["heavy_ball", "averaged"])
def test_a_tensor_as_step_size(update, device, state):
    x = lists([(9,), (2, 3)], state=state, decoupled=True)
    check(update, with_tail(x, lr=torch.tensor(LR, device=device)))


@pytest.mark.parametrize("update", ["heavy_ball", "averaged"])
def test_numbers_come_from_the_table(update):
    """A recorded update follows what is sent later."""
    x = lists([(9,), (2, 3)], decoupled=True)
    other, kernel = with_tail(x.clone(), lr=0.3, alpha1=0.5, kappa=0.2), FusedDiagonal(x.ps)
    kernel.send(other.options["tail"], beta2=BETA2, gamma=1.0, B=B, lam=LAM)
    assert kernel.update_(update, x.gs, x.ss, x.ms, x.counters, [], x.options["tail"])
    by_rule(update, other)
    assert_alike(x, other)


@pytest.mark.parametrize("which", ["ps", "gs", "ss", "ms"])
def test_memory_that_starts_anywhere(which):
    x = lists([(33,), (CHUNK + 1,)])
    setattr(x, which, [unaligned(t) for t in getattr(x, which)])
    assert getattr(x, which)[0].data_ptr() % 16 != 0
    check("heavy_ball", x)


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    ],
    ids=["channels_last", "permuted"],
)
def test_dense_memory_in_another_order(laid_out):
    x = lists([(4, 3, 2, 5), (2, 6, 3, 3)])
    for kind in x.kinds:
        kind[:] = [laid_out(t) for t in kind]
    assert not x.ps[0].is_contiguous()
    check("heavy_ball", x)


def test_strides_of_axes_of_size_one_say_nothing():
    x = lists([(4, 3, 1, 1)])
    x.gs = [x.gs[0].as_strided((4, 3, 1, 1), (3, 1, 3, 3))]
    check("heavy_ball", x)


def test_addresses_are_followed():
    x = lists([(5,), (6,)])
    kernel, other = FusedDiagonal(x.ps), x.clone()
    for i in range(3):
        x.gs = [t.clone() * 2 for t in x.gs]
        other.gs = [t.clone() for t in x.gs]
        if i == 2:
            x.ss = [unaligned(t) for t in x.ss]
        assert fused("heavy_ball", x, kernel)
        by_rule("heavy_ball", other)
        for a, b in zip(x.ps, other.ps, strict=True):
            torch.testing.assert_close(a, b)


def as_subclass(t: Tensor) -> Tensor:
    class Mine(Tensor):
        pass

    return t.as_subclass(Mine)


def _replace(kind: str, index: int, change):
    def replaced(x: Lists) -> None:
        getattr(x, kind)[index] = change(getattr(x, kind)[index])

    return replaced


def channels_last(t: Tensor) -> Tensor:
    return t.to(memory_format=torch.channels_last)


UNFIT = {
    "subclass of a gradient": _replace("gs", 1, as_subclass),
    "layout of a gradient": _replace("gs", 1, channels_last),
    "layout of a preconditioner": _replace("ss", 0, channels_last),
    "layout of a momentum": _replace("ms", 1, channels_last),
    "gradients of two dtypes": _replace("gs", 0, Tensor.bfloat16),
    "a gradient with gaps": _replace("gs", 0, lambda g: torch.cat([g, g], -1)[..., : g.shape[-1]]),
}


@pytest.mark.parametrize("what", UNFIT)
@pytest.mark.parametrize("state", [FP32, BF16])
def test_what_does_not_fit_is_left_alone(what, state):
    x = lists([(4, 3, 2, 5), (2, 6, 3, 3)], state=state)
    UNFIT[what](x)
    before = x.clone()
    assert not fused("heavy_ball", x)
    assert not x.changed_from(before)


@pytest.mark.parametrize("what", [as_subclass, Tensor.double], ids=["subclass", "float64"])
def test_parameters_that_the_kernel_does_not_know_go_by_the_rule(what):
    results = []
    for asked in (True, False):
        plain, odd = normal(4, 3), what(normal(4, 3, seed=1))
        ps = [p.requires_grad_() for p in (plain, odd)]
        optimizer = rootfree.RFRMSprop([{"params": [p]} for p in ps], batch_size=B, fused=asked)
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step()
        kernels = [w.kernel for w in find_work(optimizer)]
        assert [kernel is not None for kernel in kernels] == [asked, False]
        results.append(odd.detach().as_subclass(Tensor))
    assert torch.equal(*results)


def test_bf16_state_in_another_layout_is_left_alone():
    """Noise counts elements in the order of the indices, the kernel in the order of memory."""
    x = lists([(4, 3, 2, 5)], state=BF16)
    for kind in (x.ps, x.gs, x.ss, x.ms):
        kind[:] = [channels_last(t) for t in kind]
    assert not fused("heavy_ball", x)


def test_autograd_learns_of_the_change():
    x = lists([(3,)])
    p = torch.nn.Parameter(x.ps[0])
    y = (p * p).sum()
    x.ps = [p]
    with torch.no_grad():
        assert fused("heavy_ball", x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
