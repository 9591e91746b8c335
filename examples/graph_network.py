"""PyTorch Geometric: nodes of a graph, classified from the labels of a few.

    python examples/graph_network.py

A full-batch graph convolutional network on a random graph with three communities. The loss averages
over the nodes whose labels are known: that is B, whatever the size of the graph. Needs
`pip install torch_geometric`.
"""

import argparse

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.utils import stochastic_blockmodel_graph

import rootfree

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=100)
steps = parser.parse_args().steps

torch.manual_seed(0)
size, classes = 100, 3
within, between = 0.06, 0.01
chances = torch.full((classes, classes), between).fill_diagonal_(within)
edges = stochastic_blockmodel_graph([size] * classes, chances)
labels = torch.arange(classes).repeat_interleave(size)
features = torch.randn(classes * size, 16) + nn.functional.one_hot(labels, 16)
known = torch.arange(0, classes * size, 15)  # 20 nodes


class Network(nn.Module):
    """Two graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(16, 32)
        self.second = GCNConv(32, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(x, edges).relu(), edges)


model = Network()
optimizer = rootfree.IFShampoo(rootfree.parameter_groups(model), lr=1e-2, batch_size=len(known))
print(optimizer.summary())
for _ in range(steps):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features, edges)[known], labels[known])
    loss.backward()
    optimizer.step()
right = (model(features, edges).argmax(1) == labels).float().mean()
print(f"loss {loss.item():.4f} on {len(known)} nodes, {100 * right:.1f} % of all nodes right")
