"""Recorders on a GPU: the CPU's result, half-precision products, no synchronisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rootfree
from recorders.every_recorder import DETERMINISTIC, RECORDERS, assert_equal, curvatures, record
from recorders.networks import relative
from recorders.test_recording import N, Network, data, seeded
from rootfree.kernels.fused_stack import FusedStack
from rootfree.recorders import KFACRecorder
from rootfree.shell import block_optimizer
from rootfree.shell.gradients import find_work

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_equals_the_cpu(name: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = seeded(Network).to(device)
        recorder = RECORDERS[name](model)
        record(recorder, model, [tuple(t.to(device) for t in data())])
        found = curvatures(recorder, model, batch_size=N)
        results.append({key: [t.cpu() for t in tensors] for key, tensors in found.items()})
    assert_equal(*results)


@pytest.mark.parametrize("name", RECORDERS)
def test_every_recorder_runs_under_autocast(name: str) -> None:
    model = seeded(Network).float().cuda()
    x, y = (t.cuda() for t in data())
    recorder = RECORDERS[name](model)
    with recorder:
        with torch.autocast("cuda", torch.bfloat16):
            z = model(x.float())
        recorder.backward(nn.functional.cross_entropy(z.float(), y), z)
    for tensors in curvatures(recorder, model, batch_size=N).values():
        assert all(t.dtype == torch.float32 and torch.isfinite(t).all() for t in tensors)


def test_half_precision_rows_are_summed_in_float32() -> None:
    """4,096 rows of bf16: each entry is off by its 8 bits, the sums by far less."""
    layer = nn.Linear(96, 64, device="cuda")
    x = torch.randn(4096, 96, device="cuda")
    factors = []
    for enabled in (False, True):
        recorder = KFACRecorder(layer)
        with recorder, torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            layer(x).float().square().mean().backward()
        factors.append(recorder.of(layer.weight, batch_size=1).factors)
    for exact, half in zip(*factors, strict=True):
        assert half.dtype == torch.float32
        assert relative(half, exact) < 5e-3


def test_recording_kfac_does_not_synchronise() -> None:
    model = seeded(Network).float().cuda()
    x, y = (t.cuda() for t in data())
    recorder = KFACRecorder(model)
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with recorder:
                nn.functional.cross_entropy(model(x.float()), y).backward()
            recorder.check(list(model.parameters()))
            for p in model.parameters():
                recorder.of(p, batch_size=N)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("joint", [True, False])
def test_steps_from_graphs_are_those_without(monkeypatch, joint: bool) -> None:
    """Bit for bit; [W b] has 41 columns, which kernels pad."""
    results = []
    for limit in (block_optimizer.REPLAYED, -1.0):
        monkeypatch.setattr(block_optimizer, "REPLAYED", limit)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40)).cuda()
        recorder = KFACRecorder(model, joint=joint)
        optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
        for _ in range(12):
            optimizer.zero_grad()
            with recorder:
                model(torch.randn(N, 40, device="cuda")).square().mean().backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
        stacks = [s for w in find_work(optimizer) for _, s in w.stacks or []]
        recordings = [s._recordings for s in stacks if isinstance(s, FusedStack)]
        replayed = [each is not None and len(each._recorded) > 0 for each in recordings]
        assert any(replayed) == (limit > 0)
    assert all(map(torch.equal, *results))
