"""Gradient accumulation, mixed precision, clipping and a gradient scaler, all at once.

    python examples/accumulation_amp.py

The batch size is counted: four micro-batches a step, fewer at the end of an epoch.
"""

import argparse

import torch
from digits import accuracy, batches
from torch import nn

import rootfree

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--epochs", type=int, default=5)
epochs = parser.parse_args().epochs
device = "cuda" if torch.cuda.is_available() else "cpu"
together = 4

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(512, 10),
).to(device)  # fmt: skip
optimizer = rootfree.IFShampoo(rootfree.parameter_groups(model), lr=1e-2)
rootfree.track_batch_size(model, optimizer)
scaler = torch.amp.GradScaler(device)  # float16 needs it; with bfloat16 it does no harm

for epoch in range(epochs):
    model.train()
    micro_batches = [*batches(16)]
    for start in range(0, len(micro_batches), together):
        step = micro_batches[start : start + together]
        optimizer.zero_grad()
        for images, labels in step:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss / len(step)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    last = f"{len(step)} micro-batches, {optimizer.batch_size} images, in the last step"
    print(f"epoch {epoch + 1}: {last}; test accuracy {accuracy(model.cpu()):.1f} %")
    model.to(device)
