"""Fine-tuning with low-rank updates: a perceptron that knows five digits learns the other five."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rootfree_lab import models
from rootfree_lab.data import Batches, Dataset, Split, load

_RANK = 4
_BATCH = 64
_PRETRAINING_STEPS = 300
_HALF = 5  # of the ten classes


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained update of low rank: y = Wx + b + BAx.

    A: (r, d_in), B: (d_out, r). B starts at zero, so the layer starts as it was.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(rank, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.A.T @ self.B.T
        return y


def new_digits() -> Dataset:
    """The digits 5 to 9."""
    return _digits(new=True)


def pretrained_with_lora(*, width: int) -> nn.Module:
    """A perceptron that knows the digits 0 to 4, frozen, with an update beside each layer."""
    pretrained = copy.deepcopy(_pretrained(width))
    layers = [LoRALinear(m, _RANK) if isinstance(m, nn.Linear) else m for m in pretrained]
    return nn.Sequential(*layers)


@lru_cache(maxsize=2)
def _pretrained(width: int) -> nn.Sequential:
    """The same perceptron for every seed and device: trained on the CPU, from a fixed seed."""
    known = _digits(new=False)
    batches = Batches(
        known.train, known, batch_size=_BATCH, device="cpu", augment=False,
        generator=torch.Generator().manual_seed(1000),
    )  # fmt: skip
    epochs = -(-_PRETRAINING_STEPS // len(batches))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = models.build("mlp", known, width=width, depth=2)
    assert isinstance(model, nn.Sequential)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in islice((pair for _ in range(epochs) for pair in batches), _PRETRAINING_STEPS):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def _digits(*, new: bool) -> Dataset:
    digits = load("digits")

    def half(split: Split) -> Split:
        chosen = (split.y >= _HALF) == new
        return Split(split.x[chosen], split.y[chosen])

    return replace(digits, train=half(digits.train), test=half(digits.test))
