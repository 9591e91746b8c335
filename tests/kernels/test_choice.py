"""Rule or kernel: None takes kernels on GPUs, True also in the interpreter; one plan a bucket."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rootfree
from conformance.curvatures import FromGradients
from kernels.devices import DEVICE, normal
from rootfree.kernels import plan
from rootfree.kernels.fused_stack import FusedStack
from rootfree.kernels.stack import Stack
from rootfree.shell.gradients import find_work, memory_of

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


# -- where kernels run -----------------------------------------------------------------------


def test_none_takes_kernels_on_gpus_alone():
    assert plan.kernel_devices(None) == ("cuda",)


def test_true_takes_the_interpreter_as_well():
    assert DEVICE in plan.kernel_devices(True)


def test_false_takes_none():
    assert plan.kernel_devices(False) == ()


def test_without_triton_there_are_none_and_true_says_why(monkeypatch):
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    plan.kernel_devices.cache_clear()
    try:
        assert plan.kernel_devices(None) == ()
        with pytest.raises(ValueError, match="pip install triton"):
            rootfree.RFRMSprop([torch.nn.Parameter(torch.ones(2))], fused=True)
    finally:
        plan.kernel_devices.cache_clear()


def test_fused_is_true_false_or_none():
    with pytest.raises(ValueError, match="fused must be None, True or False, got 'yes'"):
        rootfree.RFRMSprop([torch.nn.Parameter(torch.ones(2))], fused="yes")


def test_the_rules_run_on_the_cpu_unless_asked():
    optimizer = rootfree.RFRMSprop([torch.nn.Parameter(torch.ones(2))], batch_size=1)
    assert not plan.kernels_run(torch.ones(1), optimizer._fused)


def test_float64_goes_by_the_rules():
    assert plan.kernels_run(torch.ones(1, device=DEVICE), True)
    assert not plan.kernels_run(torch.ones(1, device=DEVICE, dtype=FP64), True)


@pytest.mark.parametrize("method", [rootfree.RFRMSprop, rootfree.IFShampoo])
def test_every_optimizer_has_kernels_of_its_own(method):
    """They remember where parameters are: no two optimizers may share one."""
    found = []
    for _ in range(2):
        p = torch.nn.Parameter(normal(4, 3))
        p.grad = torch.ones_like(p)
        optimizer = method([p], batch_size=1, fused=True)
        optimizer.step()
        (work,) = find_work(optimizer)
        found.append(work.kernel or work.stacks[0][1])
    assert found[0] is not found[1]


def test_kernels_are_tried_once_and_left_alone_where_triton_fails(monkeypatch):
    device = torch.zeros(1, device=DEVICE).device  # with its number, as parameters have it
    plan._usable.cache_clear()
    assert plan._usable(device)

    def fail(*args, **kwargs):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr("rootfree.kernels.diagonal.launch", fail)
    plan._usable.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"Triton failed \(RuntimeError: no C compiler\)"):
            assert not plan._usable(device)
        p = torch.nn.Parameter(torch.ones(2, device=DEVICE))
        optimizer = rootfree.RFRMSprop([p], batch_size=1, fused=True)
        p.grad = torch.ones_like(p)
        # As on a GPU, where nobody insisted.
        monkeypatch.setattr(plan, "kernel_devices", lambda fused: (DEVICE,))
        optimizer._fused = None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is tried once
            optimizer.step()  # by the rule
        assert (p < 1).all()
        optimizer._fused = True
        with pytest.raises(RuntimeError, match="no C compiler"):
            optimizer.step()
    finally:
        plan._usable.cache_clear()


@pytest.mark.parametrize("method", [rootfree.RFRMSprop, rootfree.IFShampoo])
def test_tensors_without_numbers_are_followed_through_the_rules(method):
    """As where the memory of a training run is estimated."""
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.randn(64, 32, device=DEVICE))
        optimizer = method([p], batch_size=8, fused=True)
        p.grad = torch.randn_like(p)
        optimizer.step()
    assert sum(t.numel() for t in optimizer.state[p].values()) >= p.numel()


# -- plans -----------------------------------------------------------------------------------


def plans(shapes, *, method=rootfree.IFShampoo, dtype=FP32, fused=True, **options):
    """The plan of each parameter (of its first tile)."""
    ps = [torch.nn.Parameter(normal(*shape, dtype=dtype)) for shape in shapes]
    if method in (rootfree.IFShampoo, rootfree.IFFullAdagrad):
        options = {"matmul_dtype": BF16, **options}
    if method is not rootfree.IFWhitening:
        options["batch_size"] = 8
    optimizer = method(ps, block_size=16, fused=fused, **options)
    memory = memory_of(optimizer, optimizer.param_groups[0])
    found = {slot.p: bucket.plan for bucket in memory.buckets for slot in bucket.slots}
    return [found[p] for p in ps]


SHAPES = [(7,), (5, 6), (5, 20, 18)]  # one, two and three axes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update_rms": 0.2},
        {"max_update_rms": None},
        {"max_update_rms": 0.5, "update_rms": 0.2, "nesterov": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
        {"momentum": 0.0},
        {"state_dtype": BF16},
        {"factor_norm": None},
        {"init_scale": 1.0},
    ],
    ids=str,
)
def test_tails_and_starts_keep_the_kernels(options):
    vector, *matrices = plans(SHAPES, **options)
    assert all(each.fused and each.kernel is not None for each in (vector, *matrices))
    assert [each.dtype for each in (vector, *matrices)] == [FP32, BF16, BF16]
    assert [each.halves for each in (vector, *matrices)] == [False, True, True]


def test_matrices_keep_the_kernels_with_a_given_curvature():
    (each,) = plans([(5, 6)], curvature=FromGradients("kronecker"))
    assert each.fused
    assert each.halves
    assert each.kernel is not None


def test_factors_in_bf16_keep_the_kernels_and_are_in_one_piece():
    for each in plans(SHAPES, factor_dtype=BF16):
        assert each.kernel is not None
        assert not each.halves


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((5, 6), {"structure": ("dense", "lower_triangular")}),
        ((5, 6), {"structure": ("diagonal", "diagonal")}),
        ((7,), {"structure": "dense"}),  # one dense axis
        ((5, 6), {"riemannian_momentum": 0.5}),
        ((5, 6), {"matmul_dtype": FP32}),
        ((5, 6), {"matmul_dtype": torch.float16}),
        ((5, 6), {"factor_dtype": FP64}),
        ((17, 18, 17, 18), {"structure": "dense"}),  # four axes
        ((7,), {"curvature": FromGradients("kronecker")}),
        ((5, 6), {"curvature": FromGradients("kronecker"), "method": rootfree.IFWhitening}),
        ((5, 6), {"method": rootfree.RFShampoo}),
        ((7,), {"method": rootfree.RFFullAdagrad}),
        ((5, 6), {"method": rootfree.IFFullAdagrad}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_directions_without_a_kernel_go_by_the_rule_between_kernels(shape, options):
    """The other choices do not depend on it: kernels gather the gradients and do the tail."""
    (each,) = plans([shape], **options)
    assert each.kernel is None
    assert each.fused
    assert not each.halves
    (without,) = plans([shape], fused=False, **options)
    assert not without.fused
    assert without.dtype == each.dtype


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_fused_in_float64(shape):
    for method in (rootfree.IFShampoo, rootfree.RFShampoo):
        (each,) = plans([shape], method=method, dtype=FP64)
        assert (each.fused, each.halves, each.kernel) == (False, False, None)
        assert each.dtype == FP64


@pytest.mark.parametrize("fused", [True, False])
def test_a_group_of_several_kinds_has_a_stack_for_each(fused):
    """One stack for each dtype with kernels; another for float64, with its group."""
    ps = [torch.nn.Parameter(normal(*shape)) for shape in SHAPES]
    ps.append(torch.nn.Parameter(normal(5, 6, dtype=FP64)))
    optimizer = rootfree.IFShampoo(
        [{"params": ps[:3]}, {"params": ps[3:]}], batch_size=8, matmul_dtype=BF16, fused=fused
    )
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    stacks = [stack for work in find_work(optimizer) for _, stack in work.stacks]
    kinds = [FusedStack, FusedStack, Stack] if fused else [Stack, Stack]
    assert [type(stack) for stack in stacks] == kinds


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((17, 18, 17, 18), {}),  # four axes
        ((4, 5), {"riemannian_momentum": 0.5}),
        ((4, 5), {"matmul_dtype": torch.float16}),
    ],
    ids=["axes", "riemannian", "fp16"],
)
def test_what_the_kernels_do_not_know_goes_by_the_rule(shape, options):
    """The preconditioner bit for bit; the parameter to the rounding of the tail."""
    options = {"batch_size": 8, "block_size": 20, "matmul_dtype": BF16, "lr": 0.1, **options}
    results = []
    for fused in (True, False):
        p = torch.nn.Parameter(normal(*shape))
        optimizer = rootfree.IFShampoo([p], fused=fused, structure="dense", **options)
        for i in range(2):
            p.grad = normal(*shape, seed=i + 1)
            optimizer.step()
        results.append((p.detach(), optimizer.state[p]))
    (p, mine), (q, its) = results
    assert mine.keys() == its.keys()
    for key in its:
        if key.startswith("block"):
            assert torch.equal(mine[key], its[key]), key
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
