"""`torch.compile(optimizer.step, fullgraph=True)`: one graph, or the reason why there is none.

Tracing is what is tested here, so nothing is lowered but in one case; test_compile.py has the rest.
"""

from __future__ import annotations

import pytest
import torch

from conformance.problems import batches, loss_of, network, snapshot
from conformance.rows import ROWS

pytestmark = pytest.mark.slow

BY_NAME = {row.name: row for row in ROWS}
DIAGONAL = ["RFRMSprop", "RFRMSprop-bf16", "RFAdagrad", "RFAdamW"]


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


@pytest.mark.parametrize("name", ["IFWhitening", "RFFullAdagrad"])
def test_a_matrix_step_says_that_it_is_not_traced(name):
    """The host decides whether a step refreshes; without fullgraph the step runs as it is."""
    row = BY_NAME[name]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"BlockOptimizer\.step"):
        train(row, "eager")
    assert all(map(torch.equal, train(row, "eager", fullgraph=False), train(row, None)))
