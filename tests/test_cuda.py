"""The optimizers on a GPU: same trajectories, no synchronisation, bf16 products by default."""

from __future__ import annotations

import math

import pytest
import torch

import rootfree
from conformance.problems import batches, loss_of, network, nothing_waits, snapshot
from conformance.rows import ROWS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(row, device, steps=6, **overrides):
    model = network().to(device)
    model[1].eval()
    optimizer = row.make(model.parameters(), **overrides)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss_of(model, x.to(device), y.to(device)).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_equals_the_cpu(row):
    precise = "matmul_dtype" in row.optimizer.options and "bf16" not in row.name
    overrides = {"matmul_dtype": torch.float32} if precise else {}
    on_gpu, on_cpu = run(row, "cuda", **overrides), run(row, "cpu", **overrides)
    # Different summation orders, amplified over a few steps; bf16 state may round to a neighbour.
    tolerance = 5e-2 if "bf16" in row.name else 2e-3
    for p, q in zip(
        on_gpu.param_groups[0]["params"], on_cpu.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(p.cpu(), q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_new_tensors_may_be_on_the_gpu_by_default(row):
    """What is pinned, and what counts on the host, is there all the same."""
    trained = []
    for default in ("cpu", "cuda"):
        model, data = network().cuda(), [*batches(6)]
        model[1].eval()
        with torch.device(default):
            optimizer = row.make(model.parameters())
        for x, y in data:
            optimizer.zero_grad()
            loss_of(model, x.cuda(), y.cuda()).backward()
            with torch.device(default):
                optimizer.step()
        trained.append([*model.parameters()])
    tolerance = 5e-2 if "bf16" in row.name else 2e-3  # sums of a GPU have no fixed order
    for p, q in zip(*trained, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("missing", [False, True], ids=["all", "some_missing"])
def test_no_synchronisation(row, missing):
    optimizer = run(row, "cuda", lr=torch.tensor(0.01, device="cuda"))
    if missing:
        optimizer.param_groups[0]["params"][0].grad = None
    with nothing_waits():
        for _ in range(3):
            optimizer.step()
    assert all(torch.isfinite(t).all() for t in snapshot(optimizer))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "rules"])
def test_a_gradient_that_is_not_finite_changes_nothing(row, fused):
    """Without waiting; the host's clock of refreshes goes on."""
    optimizer = run(row, "cuda", lr=torch.tensor(0.01, device="cuda"), fused=fused)
    *_, p = optimizer.param_groups[0]["params"]
    p.grad[1] = math.nan
    before = [t.clone() for t in snapshot(optimizer) if t.is_cuda]
    with nothing_waits():
        for _ in range(3):
            optimizer.step()
    after = [t for t in snapshot(optimizer) if t.is_cuda]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.skipped_steps == 3
    p.grad[1] = 0.5
    optimizer.step()
    assert optimizer.skipped_steps == 3
    assert not torch.equal(before[0], snapshot(optimizer)[0])
    assert all(torch.isfinite(t).all() for t in snapshot(optimizer))


@pytest.mark.parametrize("companion", ["adamw", None])
@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "rules"])
def test_graphs_leave_out_steps(companion, fused):
    model = network().cuda()
    groups = rootfree.parameter_groups(model, companion=companion)
    optimizer = rootfree.IFShampoo(groups, batch_size=32, fused=fused)
    graphed = rootfree.GraphedStep(optimizer)
    pattern = [False] * 8 + [True, False, True, True, False]
    for (x, y), bad in zip(batches(len(pattern)), pattern, strict=True):
        optimizer.zero_grad()
        loss_of(model, x.cuda(), y.cuda()).backward()
        if bad:
            model[6].bias.grad[0] = math.inf
        before = [t.clone() for t in snapshot(optimizer) if t.is_cuda]
        graphed.step()
        after = [t for t in snapshot(optimizer) if t.is_cuda]
        # The first step brings factors into the form of the kernels.
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=bad)]
        assert all(same) if bad else not all(same)
    assert optimizer.skipped_steps == 3


def test_bf16_products_follow_fp32():
    row = next(row for row in ROWS if row.name == "IFShampoo")
    default = run(row, "cuda", steps=20)
    fp32 = run(row, "cuda", steps=20, matmul_dtype=torch.float32)
    start = list(network().parameters())
    for p, q, s in zip(
        default.param_groups[0]["params"], fp32.param_groups[0]["params"], start, strict=True
    ):
        assert (p - q).norm() < 0.05 * (q - s.cuda()).norm()


def test_state_follows_a_model_that_is_moved_later():
    """There and back; on the GPU the factors are kept as if it had been made there."""
    model, other = network(), network().cuda()
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=32)
    there = rootfree.IFShampoo(other.parameters(), batch_size=32)
    keys = [list(state) for state in optimizer.state.values()]
    for device in ("cuda", "cpu"):
        model.to(device)
        other.to(device)
        x, y = (t.to(device) for t in next(iter(batches(1))))
        for each, its in ((model, optimizer), (other, there)):
            its.zero_grad()
            loss_of(each, x, y).backward()
            its.step()
        states = list(optimizer.state.values())
        assert {t.device.type for state in states for t in state.values()} == {device}
        for mine, its in zip(states, there.state.values(), strict=True):
            assert mine.keys() == its.keys()
            assert all(torch.equal(mine[key], its[key]) for key in mine)
        halved = any(t.dtype == torch.int16 for state in states for t in state.values())
        assert halved == (device == "cuda")
    assert [sorted(state) for state in states] == [sorted(each) for each in keys]
