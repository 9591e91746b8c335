"""Who updates what: parameter groups from the modules of a model, and how to change them.

    python examples/groups_and_companion.py

A small transformer that reads digits row by row. It has everything that a matrix method should not
take: an embedding (of the 17 brightnesses of a pixel), positions, norms, biases, a head.
"""

import argparse

import torch
from digits import accuracy, batches
from torch import Tensor, nn

import rootfree

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--epochs", type=int, default=3)
epochs = parser.parse_args().epochs


class Reader(nn.Module):
    """A token is a row: the embeddings of its eight pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.positions = nn.Parameter(torch.zeros(8, 64))
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        pixels = (8 * (images.squeeze(1) + 1)).long()
        rows = self.embedding(pixels).flatten(2) + self.positions
        return self.head(self.layer(rows).flatten(1))


torch.manual_seed(0)
model = Reader()
groups = rootfree.parameter_groups(
    model,
    companion_lr=2e-3,  # AdamW's step size (the default); `lr` is that of the matrix method
    overrides={"positions": {"lr": 1e-2}},  # one parameter by its name
)
optimizer = rootfree.IFShampoo(groups, lr=1e-2)
rootfree.track_batch_size(model, optimizer, count="examples")
print(optimizer.summary())

for epoch in range(epochs):
    model.train()
    for images, labels in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: test accuracy {accuracy(model):.1f} %")
