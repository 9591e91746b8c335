"""`torch.compile(optimizer.step, fullgraph=True)`: one graph.

The compiler traces through the step of a diagonal method. That of a matrix method is one operation
of the graph. Tracing is what is tested here, so little is lowered; test_compile.py has the rest.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import rootfree
from conformance.problems import batches, loss_of, network, snapshot
from conformance.rows import ROWS

pytestmark = pytest.mark.slow

BY_NAME = {row.name: row for row in ROWS}
DIAGONAL = ["RFRMSprop", "RFRMSprop-bf16", "RFAdagrad", "RFAdamW"]
MATRIX = ["RFFullAdagrad", "IFFullAdagrad", "RFShampoo", "IFShampoo", "IFWhitening"]
MATRIX += ["IFShampoo-bf16", "IFShampoo-kronecker"]


def train(row, backend, *, fullgraph=True, steps=3, **options):
    torch._dynamo.reset()
    model = network()
    optimizer = row.make(model.parameters(), **options)
    step = optimizer.step
    if backend is not None:
        step = torch.compile(step, fullgraph=fullgraph, backend=backend)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        step()
    return snapshot(optimizer)


@pytest.mark.parametrize("name", DIAGONAL)
def test_a_diagonal_step_is_one_graph(name):
    row = BY_NAME[name]
    for a, b in zip(train(row, "eager"), train(row, None), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{"maximize": True}, {"nonfinite": "propagate"}], ids=str)
def test_options_do_not_break_the_graph(options):
    row = BY_NAME["RFRMSprop"]
    for a, b in zip(train(row, "aot_eager", **options), train(row, None, **options), strict=True):
        torch.testing.assert_close(a, b)


def test_the_graph_can_be_lowered():
    row = BY_NAME["RFAdamW"]
    for a, b in zip(train(row, "inductor"), train(row, None), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", MATRIX)
def test_a_matrix_step_is_one_graph(name):
    """Steps with and without a refresh, and with any lr, are the same graph."""
    rows = []
    for compiled in (True, False):
        torch._dynamo.reset()
        counters.clear()
        model = network()
        optimizer = BY_NAME[name].make(model.parameters())
        step = optimizer.step
        if compiled:
            step = torch.compile(step, fullgraph=True, backend="eager")
        graphs = []
        for x, y in batches(5):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            step()
            graphs.append(counters["stats"]["unique_graphs"])
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        assert graphs[-1] == graphs[1] <= 2 * compiled
        rows.append(snapshot(optimizer))
    assert all(map(torch.equal, *rows))


def train_in_a_loop(backend, *, copied=False):
    """Other things that change gradients and parameters are in the graph, before and after."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(24, 8), nn.Linear(8, 3))
    optimizer = rootfree.IFWhitening(rootfree.parameter_groups(model))
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))

    def update():
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with torch.no_grad():
            model[2].weight.clamp_(-0.1, 0.1)
        optimizer.step()
        with torch.no_grad():
            model[2].bias.add_(0.1)
        return model[2].weight.sum() + model[2].bias.sum()

    if backend is not None:
        update = torch.compile(update, fullgraph=True, backend=backend)
    seen = []
    for t in range(4):
        generator = torch.Generator().manual_seed(t)
        x, y = (torch.randint(n, s, generator=generator) for n, s in ((9, (6, 4)), (3, (6,))))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if t == 2:
            model[3].bias.grad = None  # another graph
        seen.append(update().detach())
    return [*seen, *(p.grad for p in model.parameters()), *snapshot(optimizer)]


@pytest.mark.parametrize(("backend", "copied"), [("aot_eager", True), ("inductor", False)])
def test_a_matrix_step_among_other_operations(backend, copied):
    compiled, plain = train_in_a_loop(backend, copied=copied), train_in_a_loop(None)
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a, b)  # inductor adds up in another order


def test_errors_pass_through_the_graph():
    model = nn.Linear(4, 4)
    optimizer = rootfree.IFWhitening(model.named_parameters(), nonfinite="raise")
    (model(torch.ones(1, 4)).sum() * torch.nan).backward()
    before = [p.detach().clone() for p in model.parameters()]
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    with pytest.raises(FloatingPointError, match="gradient of parameter weight"):
        step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_compiled_step_is_not_captured(monkeypatch):
    """A CUDA graph would repeat what the host decided once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"Use rootfree\.GraphedStep"):
        torch.ops.rootfree.step(0, [], [], [])
    assert torch.Tag.cudagraph_unsafe in torch.ops.rootfree.step.default.tags


def test_sharded_parameters_break_the_graph():
    """No graph has an operation on them; without fullgraph the step runs as it is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for compiled in (True, False):
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(4, 4))
            optimizer = rootfree.IFWhitening(model.parameters())
            step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().mean().backward()
                step()
            found.append([p.full_tensor() for p in model.parameters()])
        assert all(map(torch.equal, *found))
        step = torch.compile(optimizer.step, fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"RootFreeOptimizer\._plain_step"):
            step()
    finally:
        dist.destroy_process_group()
