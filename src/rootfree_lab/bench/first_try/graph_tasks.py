"""Classification of the nodes of a citation graph."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from rootfree_lab import models
from rootfree_lab.bench.first_try.data import dataset
from rootfree_lab.bench.first_try.task import Measured, Setting, Task, classified


def gat_cora(setting: Setting) -> Task:
    """Graph attention with the sizes and the dropout of its paper; every step sees the graph."""
    data = dataset("cora", setting.data)
    assert data.graph is not None
    graph = data.graph.to(setting.device)
    model = models.build("gat", data).to(setting.device)

    def scores(nodes: Tensor) -> Tensor:
        found: Tensor = model(graph.features, graph.edges)[nodes]
        return found

    def loss(step: int) -> Tensor:
        return cross_entropy(scores(graph.train), graph.labels[graph.train])

    def evaluate() -> Measured:
        return classified(scores(graph.test), graph.labels[graph.test])

    return Task(model, loss, len(graph.train), evaluate)
