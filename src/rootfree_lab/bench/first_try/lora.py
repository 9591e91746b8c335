"""Fine-tuning with low-rank updates: a perceptron that knows five digits learns the other five."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rootfree_lab import models
from rootfree_lab.bench.first_try.data import dataset
from rootfree_lab.bench.first_try.task import Measured, Setting, Task, batch_indices, classified
from rootfree_lab.data import Split
from rootfree_lab.data.augment import normalise

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


def with_lora(model: nn.Sequential, rank: int) -> nn.Sequential:
    """The model with an update beside each linear layer; its own parameters are frozen."""
    layers = [LoRALinear(m, rank) if isinstance(m, nn.Linear) else m for m in model]
    return nn.Sequential(*layers)


def lora_digits(setting: Setting) -> Task:
    """Rank 4 beside every layer of a perceptron pretrained on the digits 0 to 4, for 5 to 9."""
    device = setting.device
    state = torch.random.get_rng_state()
    pretrained = copy.deepcopy(_pretrained(setting.full))
    torch.random.set_rng_state(state)  # the pretraining has a seed of its own
    model = with_lora(pretrained, _RANK).to(device)
    data = dataset("digits", None)
    x, y = (part.to(device) for part in _digits(data.train, new=True))
    test_x, test_y = (part.to(device) for part in _digits(data.test, new=True))
    indices = batch_indices(setting, len(y), _BATCH)

    def loss(step: int) -> Tensor:
        return cross_entropy(model(x[indices[step]]), y[indices[step]])

    def evaluate() -> Measured:
        return classified(model(test_x), test_y)

    return Task(model, loss, _BATCH, evaluate)


@lru_cache(maxsize=2)
def _pretrained(full: bool) -> nn.Sequential:
    """The same perceptron for every seed and device: trained on the CPU, from a fixed seed."""
    data = dataset("digits", None)
    setting = Setting("full", 0, _PRETRAINING_STEPS, torch.device("cpu"), None)
    torch.manual_seed(0)
    model = models.build("mlp", data, width=256 if full else 64, depth=2)
    assert isinstance(model, nn.Sequential)
    x, y = _digits(data.train, new=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for index in batch_indices(setting, len(y), _BATCH):
        optimizer.zero_grad()
        cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return model


def _digits(split: Split, *, new: bool) -> tuple[Tensor, Tensor]:
    data = dataset("digits", None)
    chosen = (split.y >= _HALF) == new
    mean, std = torch.tensor(data.mean), torch.tensor(data.std)
    return normalise(split.x[chosen], mean, std), split.y[chosen]
