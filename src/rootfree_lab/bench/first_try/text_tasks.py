"""Language models of bytes, on the speeches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rootfree_lab import models
from rootfree_lab.bench.first_try.data import dataset
from rootfree_lab.bench.first_try.task import Measured, Setting, Task, classified

_TEST_WINDOWS = {"small": 64, "full": 512}
_AT_ONCE = 64


def gpt_sotu(setting: Setting) -> Task:
    """A transformer: 6 layers of width 384, context 256; small: 3 of width 64, context 64."""
    width, depth, heads = (384, 6, 6) if setting.full else (64, 3, 4)
    data = dataset("sotu", setting.data)
    model = models.build("gpt", data, width=width, depth=depth, heads=heads)
    context, windows = (256, 64) if setting.full else (64, 16)
    return _next_byte(setting, model, context=context, windows=windows)


def lstm_sotu(setting: Setting) -> Task:
    """Two LSTM layers of 512 units, context 128; small: one of 128 units, context 32."""
    embedding, hidden, layers = (256, 512, 2) if setting.full else (64, 128, 1)
    data = dataset("sotu", setting.data)
    model = models.build(
        "lstm", data, embedding=embedding, hidden=hidden, layers=layers, dropout=0.0, tied=False
    )
    context, windows = (128, 64) if setting.full else (32, 32)
    return _next_byte(setting, model, context=context, windows=windows)


def _next_byte(setting: Setting, model: nn.Module, *, context: int, windows: int) -> Task:
    data, device = dataset("sotu", setting.data), setting.device
    model = model.to(device)
    # As bytes on the device: an eighth of the memory of the indices that a batch needs.
    train, test = (split.x.to(torch.uint8).to(device) for split in (data.train, data.test))
    starts = torch.randint(
        len(train) - context - 1, (setting.steps, windows), generator=setting.generator()
    ).to(device)
    within = torch.arange(context + 1, device=device)

    def scores(tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens[:, :-1]).flatten(0, 1)
        return found

    def loss(step: int) -> Tensor:
        tokens = train[starts[step][:, None] + within].long()
        return cross_entropy(scores(tokens), tokens[:, 1:].flatten())

    def evaluate() -> Measured:
        count = min(_TEST_WINDOWS[setting.scale], (len(test) - 1) // context)
        first = torch.arange(count, device=device)[:, None] * context
        tokens = test[first + within].long()
        parts = [classified(scores(t), t[:, 1:].flatten()) for t in tokens.split(_AT_ONCE)]
        weights = [len(t) / count for t in tokens.split(_AT_ONCE)]
        return Measured(
            sum(w * part.loss for w, part in zip(weights, parts, strict=True)),
            sum(w * (part.error or 0.0) for w, part in zip(weights, parts, strict=True)),
        )

    return Task(model, loss, windows * context, evaluate, autocast=True)
