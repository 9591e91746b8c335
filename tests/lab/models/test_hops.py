"""Hop features against dense powers of the normalised adjacency matrix."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rootfree_lab import models
from rootfree_lab.models import graphs
from rootfree_lab.models.graphs import hop_features


def graph(n: int = 9):
    generator = torch.Generator().manual_seed(0)
    adjacency = torch.triu(torch.rand(n, n, generator=generator) < 0.3, 1)
    adjacency = adjacency | adjacency.T
    features = torch.rand(n, 4, generator=generator, dtype=torch.float64)
    return features, adjacency.nonzero().T.contiguous(), adjacency.double()


def test_dense_powers():
    features, edges, adjacency = graph()
    loops = adjacency + torch.eye(9, dtype=torch.float64)
    scale = torch.diag(loops.sum(1) ** -0.5)
    normalised = scale @ loops @ scale
    stack = hop_features(features, edges, 3)
    for k in range(4):
        expected = torch.linalg.matrix_power(normalised, k) @ features
        torch.testing.assert_close(stack[:, k], expected)


def test_edges_are_summed_in_pieces(monkeypatch):
    features, edges = torch.randn(8, 3), torch.randint(8, (2, 20))
    whole = hop_features(features, edges, 2)
    monkeypatch.setattr(graphs, "_EDGES_AT_ONCE", 7)
    torch.testing.assert_close(hop_features(features, edges, 2), whole)


def test_some_nodes_alone_have_the_scores_they_have_among_all():
    features, edges = torch.randn(8, 3), torch.randint(8, (2, 20))
    data = SimpleNamespace(kind="graph", classes=4, shape=(3,))
    model = graphs.GraphMLP(data, hidden=5, hops=2, dropout=0.0, attention="recursive").eval()
    nodes = torch.tensor([6, 0, 3])
    torch.testing.assert_close(model(features, edges, nodes), model(features, edges)[nodes])


def test_self_loops_count_once():
    features, edges, _ = graph()
    with_loop = torch.cat([edges, torch.tensor([[2], [2]])], 1)
    torch.testing.assert_close(
        hop_features(features, with_loop, 2), hop_features(features, edges, 2)
    )


def test_a_graph_is_propagated_once_and_another_anew(monkeypatch):
    calls = []
    monkeypatch.setattr(graphs, "hop_features", lambda *a: calls.append(1) or hop_features(*a))
    model = models.build("gamlp", SimpleNamespace(kind="graph", classes=2, shape=(4,)), hidden=4)
    features, edges, _ = graph()
    features = features.float()
    model(features, edges)
    model(features, edges)
    assert len(calls) == 1
    model(features + 1, edges)
    assert len(calls) == 2
    assert not any("graph" in key for key in model.state_dict())
