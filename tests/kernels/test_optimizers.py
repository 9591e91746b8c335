"""Whole optimizers with kernels (fused=True) against the rules (fused=False)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rootfree
from conformance.curvatures import FromGradients
from kernels.devices import DEVICE
from rootfree import DiagonalCurvature, KroneckerCurvature, SumOfOuterProducts
from rootfree.kernels.block_table import COLUMN
from rootfree.kernels.fused_stack import FusedStack
from rootfree.kernels.halves import joined
from rootfree.kernels.plan import kernels_run
from rootfree.kernels.stack import Stack
from rootfree.shell.gradients import find_work

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
BATCH = 8
LOW_MEMORY = {"factor_dtype": BF16, "state_dtype": BF16}
SHAMPOO = {"matmul_dtype": BF16, "block_size": 16, "lr": 0.01}


def network() -> nn.Module:
    """Weights of three axes, of two (cut into blocks, one of the size of another) and of one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 20),
        nn.Tanh(),
        nn.Linear(20, 3),
    ).to(DEVICE)


def groups(model: nn.Module) -> list[dict]:
    ps = list(model.parameters())
    return [{"params": ps[:2]}, {"params": ps[2:], "weight_decay": 0.1, "momentum": 0.5}]


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 2, 4, 4, generator=generator).to(DEVICE)
    y = torch.randint(0, 3, (BATCH,), generator=generator).to(DEVICE)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def pair(make, **options):
    models = [network(), network()]
    return models, [
        make(groups(model), batch_size=BATCH, fused=fused, **options)
        for model, fused in zip(models, (True, False), strict=True)
    ]


def run(models, optimizers, steps, change=None) -> None:
    """Both from the same gradients: what differs is the step alone."""
    for i in steps:
        backward(models[1], i)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            p.grad = q.grad.clone(memory_format=torch.preserve_format)
        if change is not None:
            for model in models:
                change(model, i)
        for optimizer in optimizers:
            optimizer.step()


def assert_alike(models, optimizers, tolerance: float) -> None:
    """Parameters within `tolerance` of how far they went; state within as much of its size."""
    for p, q, start in zip(*(m.parameters() for m in models), network().parameters(), strict=True):
        assert (p - q).norm() <= tolerance * (q - start).norm() + 1e-7 * q.norm()
        assert not torch.equal(q, start)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        mine, its = joined(optimizers[0].state[p]), optimizers[1].state[q]
        assert mine.keys() == its.keys()
        for name, t in its.items():
            if t.is_floating_point():
                assert (mine[name].float() - t.float()).norm() <= tolerance * t.float().norm()
            else:
                assert torch.equal(mine[name], t), name


DIAGONAL = {
    "RFRMSprop": (rootfree.RFRMSprop, {"lr": 0.01}),
    "RFRMSprop-bf16": (rootfree.RFRMSprop, {"lr": 0.01, "state_dtype": BF16}),
    "RFRMSprop-nesterov": (rootfree.RFRMSprop, {"lr": 0.01, "nesterov": True}),
    "RFRMSprop-decoupled": (rootfree.RFRMSprop, {"lr": 0.1, "decoupled_weight_decay": True}),
    "RFAdagrad": (rootfree.RFAdagrad, {"lr": 0.1}),
}
FULL = {"lr": 0.1, "block_size": 16}
# bf16 products: a few roundings of 2⁻⁸ a step. bf16 state: a spacing, where rounding was undecided.
ROWS = {
    **{name: (*row, 2e-3 if "bf16" in name else 1e-5) for name, row in DIAGONAL.items()},
    "IFShampoo": (rootfree.IFShampoo, SHAMPOO, 0.02),
    "IFShampoo-low-memory": (rootfree.IFShampoo, {**SHAMPOO, **LOW_MEMORY}, 0.04),
    "IFShampoo-rms": (rootfree.IFShampoo, {**SHAMPOO, "update_rms": 0.2}, 0.02),
    "IFShampoo-nesterov": (rootfree.IFShampoo, {**SHAMPOO, "nesterov": True}, 0.02),
    "IFShampoo-decoupled": (
        rootfree.IFShampoo,
        {**SHAMPOO, "lr": 0.1, "decoupled_weight_decay": True},
        0.02,
    ),
    # Gathered and finished by kernels, their directions by the rules.
    "RFShampoo": (rootfree.RFShampoo, {"lr": 0.01, "block_size": 16}, 1e-4),
    "RFShampoo-rms": (rootfree.RFShampoo, {**FULL, "update_rms": 0.2, "nesterov": True}, 1e-4),
    "RFFullAdagrad": (rootfree.RFFullAdagrad, FULL, 1e-4),
    "RFFullAdagrad-damped": (
        rootfree.RFFullAdagrad,
        {**FULL, "damping": 0.1, "max_update_rms": 0.5, "decoupled_weight_decay": True},
        1e-4,
    ),
    "IFFullAdagrad": (rootfree.IFFullAdagrad, FULL, 1e-4),
    "IFFullAdagrad-bf16": (
        rootfree.IFFullAdagrad,
        {**FULL, "matmul_dtype": BF16, **LOW_MEMORY},
        0.04,
    ),
    "IFFullAdagrad-covariance": (rootfree.IFFullAdagrad, {**FULL, "form": "covariance"}, 1e-4),
}


def stacks(optimizer) -> list:
    return [stack for work in find_work(optimizer) for _, stack in work.stacks or []]


def assert_paths(models, optimizers) -> None:
    """Kernels in the first, rules in the second."""
    assert kernels_run(next(models[0].parameters()), optimizers[0]._fused)
    assert not kernels_run(next(models[1].parameters()), optimizers[1]._fused)
    if isinstance(optimizers[0], rootfree.RFRMSprop | rootfree.RFAdagrad):
        assert all(work.kernel.fits for work in find_work(optimizers[0]))
        assert all(work.kernel is None for work in find_work(optimizers[1]))
        return
    for optimizer, kind in zip(optimizers, (FusedStack, Stack), strict=True):
        assert stacks(optimizer)
        assert {type(stack) for stack in stacks(optimizer)} == {kind}


@pytest.mark.parametrize("row", ROWS)
def test_the_same_trajectory(row):
    make, options, tolerance = ROWS[row]
    models, optimizers = pair(make, **options)
    run(models, optimizers, range(4))
    assert_paths(models, optimizers)
    assert_alike(models, optimizers, tolerance)


# -- curvature that is given -----------------------------------------------------------------


class Mixed:
    """Every form of curvature; the first linear layer is one matrix with its bias."""

    def __init__(self, model: nn.Module) -> None:
        self.layer, self.other = model[3], model[5]

    def joint(self):
        return [(self.layer.weight, self.layer.bias)]

    def check(self, params) -> None:
        pass

    def used(self) -> None:
        pass

    def of(self, p, *, batch_size: int):
        generator = torch.Generator().manual_seed(p.numel())

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        if p is self.layer.weight:
            axes = (p.shape[0], p.shape[1] + 1)
            roots = [draw(d, d) / d**0.5 for d in axes]
            return KroneckerCurvature(tuple(A @ A.mT for A in roots), axes)
        if p is self.other.weight:
            return SumOfOuterProducts(0.5 * draw(3, *p.shape))
        if p is self.other.bias:
            return DiagonalCurvature(draw(*p.shape).square())
        return None  # B·ggᵀ


# The dtype of products is named: left out, it is float32 on a CPU and bfloat16 on a GPU.
GIVEN = {
    "IFShampoo-fp32": (rootfree.IFShampoo, {**SHAMPOO, "matmul_dtype": torch.float32}, 1e-4),
    "IFShampoo-bf16": (rootfree.IFShampoo, {**SHAMPOO, "update_rms": 0.2}, 0.02),
    "RFShampoo": (rootfree.RFShampoo, {"lr": 0.01, "block_size": 16}, 1e-4),
    "RFFullAdagrad": (rootfree.RFFullAdagrad, {**FULL, "damping": 0.1}, 1e-4),
    "IFFullAdagrad": (rootfree.IFFullAdagrad, FULL, 1e-4),
}


def given_pair(row):
    """A weight and its bias must be in one group."""
    make, options, tolerance = GIVEN[row]
    models = [network(), network()]
    optimizers = [
        make(
            model.parameters(),
            batch_size=BATCH,
            weight_decay=0.1,
            fused=fused,
            curvature=Mixed(model),
            **options,
        )
        for model, fused in zip(models, (True, False), strict=True)
    ]
    return models, optimizers, tolerance


def assert_joint(optimizer, layer) -> None:
    """The blocks of the layer have elements of weight and bias."""
    slots = [
        slot
        for stack in stacks(optimizer)
        for share in stack.shares
        for slot in share.slots
        if slot.p is layer.weight
    ]
    assert any(piece.p is layer.bias for slot in slots for piece in slot.pieces)
    for stack in stacks(optimizer):
        of_bias = [p is layer.bias for p in stack.ps]
        if isinstance(stack, FusedStack) and any(of_bias) and not optimizer._flat:
            assert stack._placed.shapes[of_bias.index(True)] == COLUMN


@pytest.mark.parametrize("row", GIVEN)
def test_the_same_trajectory_with_given_curvature(row):
    """By kernels for matrices with bf16 products, by the rule between kernels for the others."""
    models, optimizers, tolerance = given_pair(row)
    run(models, optimizers, range(4))
    assert_paths(models, optimizers)
    for model, optimizer in zip(models, optimizers, strict=True):
        assert_joint(optimizer, model[3])
        for share in (share for stack in stacks(optimizer) for share in stack.shares):
            known = row == "IFShampoo-bf16" and len(share.bucket.structures) > 1
            by_kernel = known and optimizer is optimizers[0]
            assert (share.bucket.plan.kernel is not None) == by_kernel
    assert_alike(models, optimizers, tolerance)


@pytest.mark.parametrize("form", ["outer products", "kronecker", "diagonal"])
def test_the_same_trajectory_with_one_form_of_curvature(form):
    models, optimizers = pair(rootfree.IFShampoo, **SHAMPOO, curvature=FromGradients(form))
    run(models, optimizers, range(3))
    assert_paths(models, optimizers)
    assert_alike(models, optimizers, 0.02)


@pytest.mark.parametrize("missing", ["weight", "bias"])
@pytest.mark.parametrize("row", ["IFShampoo-bf16", "RFShampoo"])
def test_half_of_a_joint_pair_without_gradient(row, missing):
    """It counts as zero in the blocks, and its parameter stays."""
    models, optimizers, tolerance = given_pair(row)

    def lose(model, i):
        if i == 1:
            getattr(model[3], missing).grad = None

    run(models, optimizers, range(1))
    before = [getattr(model[3], missing).detach().clone() for model in models]
    run(models, optimizers, range(1, 2), lose)
    for model, old in zip(models, before, strict=True):
        assert torch.equal(getattr(model[3], missing), old)
    run(models, optimizers, range(2, 4))
    assert_paths(models, optimizers)
    assert_alike(models, optimizers, tolerance)


def adamw(params, **options):
    for group in params:  # it has betas in place of momentum
        group.pop("momentum", None)
    return rootfree.RFAdamW(params, **options)


@pytest.mark.parametrize("state", [None, BF16])
def test_the_same_trajectory_of_adamw(state):
    models, optimizers = pair(adamw, lr=0.01, state_dtype=state)
    run(models, optimizers, range(4))
    assert_alike(models, optimizers, 1e-5 if state is None else 2e-3)


@pytest.mark.parametrize("row", ["RFRMSprop", "IFShampoo", "IFShampoo-rms", "IFFullAdagrad"])
def test_gradients_that_are_missing_on_some_steps(row):
    make, options, tolerance = ROWS[row]
    models, optimizers = pair(make, **options)

    def lose(model, i):
        if i % 2 == 0:
            model[3].weight.grad = None

    run(models, optimizers, range(3), lose)
    assert_alike(models, optimizers, tolerance)


@pytest.mark.parametrize(
    "row", ["RFRMSprop", "RFRMSprop-bf16", "IFShampoo-low-memory", "IFShampoo-rms", "RFShampoo-rms"]
)
def test_channels_last(row):
    make, options, tolerance = ROWS[row]
    models = [network().to(memory_format=torch.channels_last) for _ in range(2)]
    assert not models[0][0].weight.is_contiguous()
    optimizers = [
        make(groups(m), batch_size=BATCH, fused=fused, **options)
        for m, fused in zip(models, (True, False), strict=True)
    ]
    run(models, optimizers, range(2))
    assert_alike(models, optimizers, tolerance)


@pytest.mark.parametrize("row", ["RFRMSprop-bf16", "IFShampoo-low-memory"])
def test_a_checkpoint_in_the_middle(row):
    """Saved, loaded into a new optimizer, and carried on: the same bits as without."""
    make, options, _ = ROWS[row]
    model = network()
    optimizer = make(groups(model), batch_size=BATCH, fused=True, **options)
    backward(model, 0)
    optimizer.step()
    resumed = copy.deepcopy(model)
    other = make(groups(resumed), batch_size=BATCH, fused=True, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for i in (1, 2):
        backward(model, i)
        for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
            q.grad = p.grad.clone(memory_format=torch.preserve_format)
        optimizer.step()
        other.step()
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, t in optimizer.state[p].items():
            assert torch.equal(t, other.state[q][name]), name


def test_blocks_of_one_bucket_may_lie_in_memory_in_different_ways():
    """A whole parameter is one piece of memory, a block inside another is rows: both of 16×16."""
    for shapes in ([(16, 16), (16, 32)], [(16, 32), (16, 16)]):
        torch.manual_seed(0)
        start = [torch.randn(shape, device=DEVICE) for shape in shapes]
        factors = []
        for fused in (True, False):
            ps = [nn.Parameter(t.clone()) for t in start]
            optimizer = rootfree.IFShampoo(ps, batch_size=BATCH, fused=fused, **SHAMPOO)
            for i, p in enumerate(ps):
                p.grad = 10.0**i * start[i].roll(1)
            optimizer.step()
            factors.append([joined(s)["block0.factor0"] for s in optimizer.state.values()])
        for mine, its in zip(*factors, strict=True):
            assert (mine - its).norm() < 0.01 * its.norm()


def test_momentum_that_is_turned_on_later():
    models, optimizers = pair(rootfree.IFShampoo, **{**SHAMPOO, **LOW_MEMORY})
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["momentum"] = 0.0

    def change(model, i):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["momentum"] = 0.9 * (i > 0)

    run(models, optimizers, range(2), change)
    assert_alike(models, optimizers, 0.04)


def test_state_in_another_layout_than_its_parameter():
    """The model was brought to another layout after the optimizer was made."""
    for state in (None, BF16):
        models = [network().to(memory_format=torch.channels_last) for _ in range(2)]
        optimizers = [
            rootfree.RFRMSprop(m.parameters(), batch_size=BATCH, fused=fused, state_dtype=state)
            for m, fused in zip(models, (True, False), strict=True)
        ]
        run(models, optimizers, range(1))
        for model in models:
            model.to(memory_format=torch.contiguous_format)
            model[0].weight.data = model[0].weight.data.contiguous()
        run(models, optimizers, range(1, 3))
        assert_alike(models, optimizers, 2e-3)
