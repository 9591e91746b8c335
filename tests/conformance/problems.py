"""Small problems that the conformance tests train on, and how training state is compared."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

BATCH = 32


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A small network with weights of four, two and one axes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).to(dtype)


def batches(steps: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Iterable:
    """Images with labels that a small network can learn: the brightest third."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(BATCH, 1, 4, 4, generator=generator)
        y = x.flatten(1)[:, :15].view(BATCH, 3, 5).sum(-1).argmax(1)
        yield x.to(dtype), y


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Inside, whatever makes the host wait for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer, data: Iterable) -> list[float]:
    """Plain training loop; returns the losses."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(optimizer) -> list[Tensor]:
    """Copies of all parameters and all state, in order."""
    tensors = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors.append(p.detach().clone())
            tensors.extend(t.clone() for _, t in sorted(optimizer.state[p].items()))
    return tensors


def identical(left: list[Tensor], right: list[Tensor]) -> bool:
    """Equal bit for bit, dtypes included."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def groups_without_params(optimizer) -> list[dict]:
    return [
        {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
