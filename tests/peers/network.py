"""A tiny float64 network with every kind of parameter, and a fixed sequence of batches.

Parameters: convolutions of four axes and with axes of size one, linear weights (one with a single
output row), biases, norm vectors, an embedding, and a scalar. Batch sizes vary from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

BATCH_SIZES = (4, 6, 3)


class TinyNetwork(nn.Module):
    """Images (b, 2, 4, 4) and tokens (b, 3) in [0, 5) to three logits and one margin."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.pointwise = nn.Conv2d(3, 4, 1, bias=False)
        self.embedding = nn.Embedding(5, 3)
        self.layer_norm = nn.LayerNorm(7)
        self.linear = nn.Linear(7, 3)
        self.single = nn.Linear(3, 1)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(images)))
        x = torch.tanh(self.pointwise(x)).mean(dim=(2, 3))
        e = self.embedding(tokens).mean(dim=1)
        logits = self.linear(self.layer_norm(torch.cat([x, e], dim=1)))
        return self.temperature * torch.cat([logits, self.single(torch.tanh(logits))], dim=1)


def make_network(seed: int = 0) -> TinyNetwork:
    """The same float64 network for the same seed, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = TinyNetwork().double()
    return network.train()


def batches(steps: int, seed: int = 1) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(images, tokens, targets) for each step; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for t in range(steps):
        b = BATCH_SIZES[t % len(BATCH_SIZES)]
        images = torch.randn(b, 2, 4, 4, generator=generator, dtype=torch.float64)
        tokens = torch.randint(0, 5, (b, 3), generator=generator)
        targets = torch.randint(0, 4, (b,), generator=generator)
        yield images, tokens, targets


@dataclass
class Trajectory:
    """What a run leaves behind, one entry per step: everything cloned, keyed by parameter name."""

    params: list[dict[str, Tensor]] = field(default_factory=list)  # after the step
    grads: list[dict[str, Tensor]] = field(default_factory=list)  # that the step used
    batch_sizes: list[int] = field(default_factory=list)
    factors: list[dict[str, list[Tensor]]] = field(default_factory=list)  # dense K_n after the step


def train(
    network: nn.Module,
    step: Callable[[int], None],
    steps: int,
    factors: Callable[[], dict[str, list[Tensor]]] | None = None,
) -> Trajectory:
    """Run `step(batch_size)` after each backward pass of an averaged cross-entropy loss."""
    out = Trajectory()
    for images, tokens, targets in batches(steps):
        network.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(images, tokens), targets).backward()
        grads = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
        out.grads.append(grads)
        out.batch_sizes.append(len(images))
        step(len(images))
        out.params.append({n: p.detach().clone() for n, p in network.named_parameters()})
        if factors is not None:
            out.factors.append(factors())
    return out
