"""The training loop that you know; only the optimizer is another.

    python examples/plain_loop.py

One optimizer for the whole model: hidden matrices by inverse-free whitening, the head and vectors
by AdamW.
"""

import argparse

import torch
from digits import accuracy, batches
from torch import nn

import rootfree

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--epochs", type=int, default=10)
epochs = parser.parse_args().epochs

torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
optimizer = rootfree.IFWhitening(rootfree.parameter_groups(model))
loader = batches()
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))

for epoch in range(epochs):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {accuracy(model):.1f} %")
