"""Convex problems: one linear map, float32, constant learning rate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from rootfree_lab import models
from rootfree_lab.bench.first_try.data import dataset
from rootfree_lab.bench.first_try.task import Measured, Setting, Task, batch_indices, classified

_BATCH = 64


def logistic_breast_cancer(setting: Setting) -> Task:
    """Logistic regression with two classes."""
    return _linear(setting, "breast_cancer")


def least_squares_diabetes(setting: Setting) -> Task:
    """Linear regression; the targets are standardised."""
    return _linear(setting, "diabetes")


def _linear(setting: Setting, name: str) -> Task:
    data, device = dataset(name, None), setting.device
    model = models.build("linear", data).to(device)
    x, y, test_x, test_y = (
        part.to(device) for part in (data.train.x, data.train.y, data.test.x, data.test.y)
    )
    indices = batch_indices(setting, len(x), _BATCH)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        return cross_entropy(outputs, y) if data.classes else mse_loss(outputs, y[:, None])

    def evaluate() -> Measured:
        if data.classes:
            return classified(model(test_x), test_y)
        return Measured(float(loss_of(test_x, test_y)), None)

    # B: rows, times the one output of a regression.
    outputs = 1 if data.classes else model(torch.zeros_like(x[:1])).shape[1]
    return Task(
        model,
        lambda step: loss_of(x[indices[step]], y[indices[step]]),
        _BATCH * outputs,
        evaluate,
        full_loss=lambda: loss_of(x, y),
    )
