"""A gradient that is not finite: the step is left out, by every method and on every route."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rootfree
from conformance.curvatures import FromGradients
from conformance.problems import batches, loss_of, network, snapshot
from conformance.rows import ROWS
from rootfree.kernels.rounding import Within
from rootfree.kernels.stack import Stack
from rootfree.shell import gradients
from rootfree.shell.work import Work

BY_NAME = {row.name: row for row in ROWS}
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.fixture(params=["host", "device"])
def decides(request, monkeypatch) -> str:
    """Who decides: the host, as on a CPU, or the device, as on a GPU."""
    if request.param == "device":
        on_device(monkeypatch)
    return request.param


def on_device(monkeypatch) -> None:
    monkeypatch.setattr(gradients, "host_reads", lambda device: False)


def backward(model, x, y, *, bad: float | None = None) -> None:
    """Gradients; one number of one of them is `bad`."""
    model.zero_grad()
    loss_of(model, x, y).backward()
    if bad is not None:
        *_, p = model.parameters()
        p.grad.view(-1)[1] = bad


def tensors_of(optimizer) -> dict[str, torch.Tensor]:
    """Parameters and state, in the form that checkpoints have whatever the kernels keep."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()["state"]
    found = {f"{i}.parameter": p.detach() for i, p in enumerate(params)}
    return found | {f"{i}.{key}": t for i, row in state.items() for key, t in row.items()}


def bits(optimizer) -> dict[str, list[int]]:
    """Copies of them, as bytes: zeros have signs."""
    return {
        key: t.contiguous().view(-1).view(torch.uint8).tolist()
        for key, t in tensors_of(optimizer).items()
    }


def run(row, pattern, *, decides="host", **overrides):
    """Train through the batches; where the pattern has a number, a gradient has it too."""
    model = network()
    optimizer = row.make(model.parameters(), **overrides)
    for (x, y), bad in zip(batches(len(pattern)), pattern, strict=True):
        backward(model, x, y, bad=bad)
        before = bits(optimizer)
        optimizer.step()
        after = bits(optimizer)
        changed = {key for key in before if before[key] != after[key]}
        if decides == "device":
            # The host's clock of refreshes goes on: it does not know what the device found.
            changed = {key for key in changed if not key.endswith(".refresh_clock")}
        assert bool(changed) == (bad is None), changed
    return optimizer


@every_row
def test_nothing_changes_and_training_goes_on(row, decides):
    optimizer = run(row, [None, math.nan, None, math.inf, -math.inf, None], decides=decides)
    assert optimizer.skipped_steps == 3
    assert all(t.isfinite().all() for t in snapshot(optimizer))


@every_row
def test_finite_gradients_are_updated_as_if_nobody_looked(row, monkeypatch):
    """Bit for bit, also where the device decides and copies are put back."""
    for where in ("host", "device"):
        if where == "device":  # the rates of a fast start are rounded otherwise there
            on_device(monkeypatch)
        expected = bits(run(row, [None] * 3, nonfinite="propagate"))
        assert bits(run(row, [None] * 3)) == expected


MATRICES = ["IFShampoo", "IFShampoo-structured", "IFWhitening-bf16", "RFShampoo", "RFFullAdagrad"]


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("way", ["checkpoint", "copy", "pickle", "loaded twice"])
def test_a_run_with_skipped_steps_goes_on_as_it_would_have(name, way, monkeypatch):
    """Steps that the device left out are not counted, but the clock of refreshes has moved."""
    on_device(monkeypatch)
    row, pattern = BY_NAME[name], [None, math.nan, None, math.inf, None, None]
    optimizer = run(row, pattern, decides="device", update_every=4)
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    if way == "copy":
        other = copy.deepcopy(optimizer)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        assert {int(state["refresh_clock"]) for state in saved["state"].values()} == {6}
        ps = [nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
        other = row.make(ps, update_every=4)
        if way == "loaded twice":  # into state that is laid out, and has a clock of its own
            for p in ps:
                p.grad = torch.zeros_like(p)
            other.step()
            with torch.no_grad():
                for p, q in zip(ps, optimizer.param_groups[0]["params"], strict=True):
                    p.copy_(q)
        other.load_state_dict(saved)
    for _ in range(5):
        for p, q in zip(*(o.param_groups[0]["params"] for o in (optimizer, other)), strict=True):
            p.grad = torch.sin(17 * p.detach() + 1)
            q.grad = torch.sin(17 * q.detach() + 1)
        assert optimizer.refreshes_next == other.refreshes_next
        optimizer.step()
        other.step()
    assert bits(optimizer) == bits(other)


@pytest.mark.parametrize("value", ["x", torch.tensor(-1), torch.tensor(0.5), torch.ones(2)])
def test_a_clock_that_is_no_count_is_refused(value):
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = rootfree.IFShampoo([p], batch_size=1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["refresh_clock"] = value
    with pytest.raises(ValueError, match="refresh_clock"):
        optimizer.load_state_dict(saved)


KERNELS = ["RFRMSprop", "RFRMSprop-bf16", "RFAdamW-bf16", "RFShampoo"]
KERNELS += ["IFShampoo-bf16", "IFShampoo-rms", "IFWhitening"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_cuda.py has it on the GPU")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_write_nothing(name, monkeypatch):
    pytest.importorskip("triton")
    on_device(monkeypatch)
    row = BY_NAME[name]
    fast = {"matmul_dtype": torch.bfloat16} if "matmul_dtype" in row.optimizer.options else {}
    pattern = [math.nan, None, math.inf]
    optimizer = run(row, pattern, decides="device", fused=True, **fast)
    assert optimizer.skipped_steps == 2


@pytest.mark.parametrize("missed", [(), (1,)], ids=["all gradients", "some are missing"])
def test_a_group_left_to_adamw_decides_with_the_matrices(decides, missed):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    optimizer = rootfree.IFShampoo(rootfree.parameter_groups(model), batch_size=2)
    for bad in (None, math.nan, None):
        model.zero_grad()
        model(torch.tensor([1, 2])).square().mean().backward()
        for i in missed:
            model[i].weight.grad = None
        if bad is not None:
            model[0].weight.grad[0, 0] = bad  # AdamW's
        before = {p: p.detach().clone() for p in model.parameters()}
        steps = [row["step"].clone() for row in optimizer.state.values() if "exp_avg" in row]
        optimizer.step()
        same = [torch.equal(p, before[p]) for p in before if p.grad is not None]
        assert all(same) if bad is not None else not any(same)
        after = [row["step"] for row in optimizer.state.values() if "exp_avg" in row]
        assert torch.equal(torch.stack(steps), torch.stack(after)) == (bad is not None)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("name", ["RFRMSprop", "IFShampoo", "RFFullAdagrad"])
def test_raise_names_the_parameter_and_changes_nothing(name):
    model = network()
    optimizer = BY_NAME[name].make(model.named_parameters(), nonfinite="raise")
    x, y = next(iter(batches(1)))
    backward(model, x, y, bad=math.nan)
    before = bits(optimizer)
    with pytest.raises(FloatingPointError, match=r"of parameter 6\.bias of shape \(3,\)"):
        optimizer.step()
    assert before == bits(optimizer)
    assert optimizer.skipped_steps == 0
    backward(model, x, y)
    optimizer.step()


class WithHole(FromGradients):
    """Curvature with a number that is not finite, of one parameter in one step."""

    bad: torch.Tensor | None = None

    def of(self, p, *, batch_size):
        H = super().of(p, batch_size=batch_size)
        if p is self.bad:
            (H.V if self.form == "outer products" else H.h).view(-1)[1] = math.inf
        return H


@pytest.mark.parametrize("mode", ["skip", "raise"])
@pytest.mark.parametrize(
    ("method", "form"),
    [("RFFullAdagrad", "outer products"), ("RFRMSprop", "diagonal"), ("IFShampoo", "diagonal")],
)
def test_a_curvature_that_is_not_finite_changes_nothing(method, form, mode, decides):
    model, curvature = network(), WithHole(form)
    optimizer = getattr(rootfree, method)(
        model.named_parameters(), batch_size=32, curvature=curvature, nonfinite=mode
    )
    for (x, y), bad in zip(batches(2), (model[6].bias, None), strict=True):
        backward(model, x, y)
        curvature.bad = bad
        before = bits(optimizer)
        if bad is not None and mode == "raise":
            with pytest.raises(FloatingPointError, match=r"curvature of parameter 6\.bias"):
                optimizer.step()
        else:
            optimizer.step()
        clock = {key for key in bits(optimizer) if key.endswith(".refresh_clock")}
        changed = {key for key in before if before[key] != bits(optimizer)[key]} - clock
        assert bool(changed) == (bad is None)
    assert optimizer.skipped_steps == (mode == "skip")


def test_propagate_does_not_look():
    model = network()
    optimizer = rootfree.RFRMSprop(model.parameters(), batch_size=32, nonfinite="propagate")
    x, y = next(iter(batches(1)))
    backward(model, x, y, bad=math.nan)
    optimizer.step()
    assert list(model.parameters())[-1].isnan().any()


@pytest.mark.parametrize("value", [None, True, "ignore", 3])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="nonfinite must be one of 'skip', 'raise', 'propagate'"):
        rootfree.RFRMSprop([nn.Parameter(torch.ones(2))], batch_size=1, nonfinite=value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_large_numbers_are_finite(dtype, decides):
    """Sums of their squares are not."""
    largest = torch.finfo(dtype).max
    gs = [torch.full((5, 3), largest, dtype=dtype), torch.zeros(2, dtype=dtype)]
    flag = gradients.Watch("skip", fused=False)._flag
    assert not flag(gs, torch.device("cpu"))
    gs[1][1] = -math.inf
    assert flag(gs, torch.device("cpu"))


def test_gradients_of_several_dtypes_and_parameters_without_elements(decides):
    ps = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float64, torch.bfloat16)]
    ps.append(nn.Parameter(torch.ones(0, 3)))
    optimizer = rootfree.RFRMSprop(ps, batch_size=1)
    for bad in (1.0, math.nan):
        for p in ps:
            p.grad = torch.full_like(p, 1.0)
        ps[1].grad[0] = bad
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert ps[0].isfinite().all()


def test_the_batch_counter_starts_anew_after_a_step_that_is_left_out():
    model = nn.Linear(3, 1)
    optimizer = rootfree.RFRMSprop(model.parameters())
    rootfree.track_batch_size(model, optimizer)
    for length, bad in ((8, math.nan), (4, 1.0)):
        model.zero_grad()  # not the optimizer's, which would start the count anew
        (model(torch.ones(length, 3)).mean() * bad).backward()
        optimizer.step()
    assert (optimizer.skipped_steps, optimizer.batch_size) == (1, 4)


def test_copies_keep_the_mode_and_count_for_themselves():
    p = nn.Parameter(torch.ones(2))
    optimizer = rootfree.RFRMSprop([p], batch_size=1, nonfinite="raise")
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (q,) = other.param_groups[0]["params"]
        q.grad = torch.full_like(q, math.nan)
        with pytest.raises(FloatingPointError):
            other.step()
    kept = rootfree.RFRMSprop([p], batch_size=1)
    p.grad = torch.full_like(p, math.nan)
    kept.step()
    assert (kept.skipped_steps, copy.deepcopy(kept).skipped_steps) == (1, 0)


def test_portions_of_sharded_parameters_are_rounded_like_all_at_once(monkeypatch):
    """Where the device decides, large models are copied and updated in portions."""
    found = []
    for at_once in (2**26, 6):
        monkeypatch.setattr("rootfree.methods.diagonal.AT_ONCE", at_once)
        torch.manual_seed(0)
        ps = [nn.Parameter(torch.randn(2, 3)) for _ in range(3)]
        optimizer = rootfree.RFRMSprop(ps, batch_size=1, state_dtype=torch.bfloat16, fused=False)
        (group,), rows = optimizer.param_groups, [optimizer.state[p] for p in ps]
        withins = [Within((2 * n, 0), (6, 3)) for n in range(3)]
        gs = [torch.randn(2, 3) for _ in ps]
        work = Work(group, [0, 1, 2], ps, rows, gs, withins=withins, skip=torch.zeros(()))
        with torch.no_grad():
            optimizer._update(work)
        found.append([t for p, row in zip(ps, rows, strict=True) for t in (p, *row.values())])
    assert all(map(torch.equal, *found))


def test_no_copies_are_taken_where_the_host_decides(monkeypatch):
    """The copies of the device's route would double the memory of a step."""
    seen = []

    def tell(self, skip) -> None:
        seen.append(skip)
        self.skip = skip

    monkeypatch.setattr(Stack, "tell", tell)
    run(BY_NAME["IFShampoo"], [None])
    assert set(seen) == {None}


@pytest.mark.slow
def test_ranks_with_shards_decide_alike(tmp_path):
    """The number that is not finite is on one of them. Either is told of its own part alone."""
    script = str(Path(__file__).with_name("nonfinite_ranks.py"))
    address = (tmp_path / "rendezvous").as_uri()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), address], **pipes) for rank in range(2)
    ]
    for rank in ranks:
        try:
            out, err = rank.communicate(timeout=120)
        finally:
            rank.kill()
        assert rank.returncode == 0, err
        both = {"host": [1, True], "device": [1, True]}
        assert json.loads(out) == {**both, "diagnostics": [True, True]}
