"""Graph models: forward(features (n, f), edges (2, m)) -> class scores (n, classes).

A model that `takes_nodes` can be asked for the scores of some nodes alone: forward(features, edges,
nodes (k,)) -> (k, classes).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rootfree_lab.config.reading import check_names
from rootfree_lab.data import Dataset

# Edges that are summed over at a time: bounds the memory of the features at their ends.
_EDGES_AT_ONCE = 1 << 22


class GraphAttention(nn.Module):
    """Two graph attention layers of PyTorch Geometric, with the sizes of Veličković et al. 2018."""

    def __init__(
        self, data: Dataset, *, hidden: int = 8, heads: int = 8, dropout: float = 0.6
    ) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv  # type: ignore[import-untyped]

        self.dropout = dropout
        self.first = GATConv(data.shape[0], hidden, heads=heads, dropout=dropout)
        self.second = GATConv(hidden * heads, data.classes, heads=1, dropout=dropout)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        x = functional.dropout(features, self.dropout, self.training)
        x = functional.elu(self.first(x, edges))
        x = functional.dropout(x, self.dropout, self.training)
        scores: Tensor = self.second(x, edges)
        return scores


@torch.no_grad()
def hop_features(features: Tensor, edges: Tensor, hops: int) -> Tensor:
    """X, ÂX, ..., Â^hops X, stacked to (n, hops + 1, f); Â = D^{-1/2}(A + I)D^{-1/2}.

    Of the self-loops among the edges and those of I, each node keeps one.
    """
    from torch_geometric.nn.conv.gcn_conv import gcn_norm  # type: ignore[import-untyped]

    (source, target), weight = gcn_norm(edges, num_nodes=len(features), dtype=features.dtype)
    stack = [features]
    for _ in range(hops):
        # (ÂX)_i = Σ_j Â_ij X_j
        total = torch.zeros_like(features)
        for some in torch.arange(len(source), device=source.device).split(_EDGES_AT_ONCE):
            total.index_add_(0, target[some], weight[some, None] * stack[-1][source[some]])
        stack.append(total)
    return torch.stack(stack, 1)


def _perceptron(sizes: tuple[int, int, int], dropout: float) -> nn.Sequential:
    a, b, c = sizes
    return nn.Sequential(
        nn.Linear(a, b), nn.BatchNorm1d(b), nn.PReLU(), nn.Dropout(dropout), nn.Linear(b, c)
    )


class GraphMLP(nn.Module):
    """GAMLP (Zhang et al. 2022): attention over precomputed hops, then a perceptron.

    A node's features at hop k, X⁽ᵏ⁾ = ÂᵏX, hold no parameters, so they are made once for a graph.
    Each hop is scored against a reference, and the perceptron sees Σₖ softmax(scores)ₖ X⁽ᵏ⁾:

        jk:         the reference is a perceptron's view of all hops together
        recursive:  the reference of hop k is the combination of the hops before it
    """

    takes_nodes = True  # what a node needs of the others is in its hops

    def __init__(
        self, data: Dataset, *, hidden: int = 512, hops: int = 5, dropout: float = 0.5,
        attention: str = "jk",
    ) -> None:  # fmt: skip
        check_names("the attention of gamlp", [attention], ("jk", "recursive"))
        super().__init__()
        features = data.shape[0]
        self.hops, self.attention = hops, attention
        self.dropout = nn.Dropout(dropout)
        if attention == "jk":
            sizes = ((hops + 1) * features, hidden, hidden)
            self.reference = nn.Sequential(_perceptron(sizes, dropout), nn.PReLU())
            self.score = nn.Linear(hidden + features, 1)
        else:
            self.score = nn.Linear(2 * features, 1)
        self.output = _perceptron((features, hidden, data.classes), dropout)
        self._graph: tuple[Tensor, Tensor, Tensor] | None = None  # features, edges, hops

    def forward(self, features: Tensor, edges: Tensor, nodes: Tensor | None = None) -> Tensor:
        stack = self._stacked(features, edges)
        scores: Tensor = self.classify(stack if nodes is None else stack[nodes])
        return scores

    def classify(self, stack: Tensor) -> Tensor:
        """Class scores of nodes from their hop features (n, hops + 1, f)."""
        x = self.dropout(stack)
        weights = self._jk_scores(x) if self.attention == "jk" else self._recursive_scores(x)
        combined = torch.einsum("nk,nkf->nf", weights.softmax(1), x)
        scores: Tensor = self.output(combined)
        return scores

    def _jk_scores(self, x: Tensor) -> Tensor:
        reference = self.dropout(self.reference(x.flatten(1)))[:, None].expand(-1, x.shape[1], -1)
        scores: Tensor = self.score(torch.cat([reference, x], -1)).squeeze(-1)
        return scores.sigmoid()

    def _recursive_scores(self, x: Tensor) -> Tensor:
        history, scores = x[:, 0], x.new_empty(len(x), 0)
        for k in range(x.shape[1]):
            new = self.score(torch.cat([history, x[:, k]], -1)).sigmoid()
            scores = torch.cat([scores, new], 1)
            history = torch.einsum("nk,nkf->nf", scores.softmax(1), x[:, : k + 1])
        return scores

    def _stacked(self, features: Tensor, edges: Tensor) -> Tensor:
        known = self._graph
        if known is None or known[0] is not features or known[1] is not edges:
            self._graph = known = (features, edges, hop_features(features, edges, self.hops))
        return known[2]
