"""A first look: a small network on real images, a few optimizers, one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import cast

import torch
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rootfree

BATCH = 64

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# The step sizes of torch's optimizers gave the lowest training loss of a grid with three or four
# values a factor of three apart, on this very problem; ours are the library's defaults.
OPTIMIZERS: dict[str, Factory] = {
    "SGD, momentum 0.9": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "RFRMSprop": lambda ps: rootfree.RFRMSprop(ps, batch_size=BATCH),
    "RFAdamW": lambda ps: rootfree.RFAdamW(ps, batch_size=BATCH),
    "IFShampoo": lambda ps: rootfree.IFShampoo(ps, batch_size=BATCH),
}


@dataclass(frozen=True)
class Digits:
    """The 1,797 8x8 digits of scikit-learn, one fifth held out."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @classmethod
    def load(cls) -> Digits:
        """Read, scale to unit range, split by a fixed permutation."""
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        y = torch.tensor(labels)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        held_out = len(y) // 5
        test, train = order[:held_out], order[held_out:]
        return cls(x[train], y[train], x[test], y[test])


@dataclass(frozen=True)
class Result:
    """One training run."""

    train_loss: float
    test_error: float
    seconds: float


def small_cnn() -> nn.Module:
    """Two convolutions and a linear layer, 20 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def train(data: Digits, factory: Factory, *, seed: int, epochs: int) -> Result:
    """Train from a seed; all optimizers see the same initial weights and batches."""
    torch.manual_seed(seed)
    model = small_cnn()
    optimizer = factory(model.parameters())
    steps = epochs * (len(data.train_y) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    start = time.perf_counter()
    for _ in range(epochs):
        # Whole batches only: B is then the same at every step.
        for batch in torch.randperm(len(data.train_y))[: len(data.train_y) // BATCH * BATCH].split(
            BATCH
        ):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.train_x[batch]), data.train_y[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        train_loss = nn.functional.cross_entropy(model(data.train_x), data.train_y).item()
        wrong = (model(data.test_x).argmax(1) != data.test_y).float().mean().item()
    return Result(train_loss, wrong, seconds)


def run_demo(*, seeds: int, epochs: int) -> Table:
    """Train with every optimizer and lay the medians out in a table."""
    data = Digits.load()
    table = Table(title=f"Handwritten digits, small CNN, {epochs} epochs, median of {seeds} seeds")
    table.add_column("optimizer")
    for heading in ("training loss", "test error", "seconds"):
        table.add_column(heading, justify="right")
    for name, factory in OPTIMIZERS.items():
        runs = [train(data, factory, seed=seed, epochs=epochs) for seed in range(seeds)]
        loss, error, seconds = (
            cast(float, median(getattr(run, field) for run in runs))
            for field in ("train_loss", "test_error", "seconds")
        )
        table.add_row(name, f"{loss:.2e}", f"{100 * error:.2f} %", f"{seconds:.1f}")
    return table
