"""Losses: each averages over its targets (images, rows, nodes, tokens), whose number is B."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rootfree_lab.config import own_code
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.config.settings import TrainConfig

Loss = Callable[[Tensor, Tensor], Tensor]


def make_loss(config: TrainConfig, *, classes: int, kind: str) -> Loss:
    """The loss of a run: a function of outputs and targets."""
    if own_code.is_own(config.loss):
        return own_loss(config.loss)
    if config.loss == "cross_entropy":
        if classes == 0:
            raise ConfigError("train.loss must be 'square' for regression, got 'cross_entropy'")
        return partial(cross_entropy, label_smoothing=config.label_smoothing)
    if classes == 0:
        return squared_error
    if kind == "text":
        raise ConfigError("train.loss must be 'cross_entropy' for text, got 'square'")
    return partial(square_loss, k=config.square_k, m=config.square_m)


def own_loss(name: str) -> Loss:
    """A user's loss: a function of outputs and targets, or a class of such objects."""
    what, found = f"the loss {own_code.shown(name)}", own_code.load("train.loss", name)
    if inspect.isclass(found):
        own_code.check_arguments(what, found, {})
        found = own_code.call(what, found, {})
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{what} must take outputs and targets: {error}") from error

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = found(outputs, targets)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"{what} must return a scalar, the mean over examples; got {got}")
        return value

    return loss


def cross_entropy(outputs: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Mean over examples, or over tokens: outputs (..., classes), labels (...).

    With smoothing ε the target is 1 - ε on the label and ε spread over all classes.
    """
    outputs = outputs.float()  # a log-sum-exp over a vocabulary does not fit in bf16
    return functional.cross_entropy(
        outputs.flatten(0, -2), labels.flatten(), label_smoothing=label_smoothing
    )


def square_loss(outputs: Tensor, labels: Tensor, *, k: float = 1.0, m: float = 1.0) -> Tensor:
    """Square loss for classification, Hui & Belkin 2021.

    (1/C) (k (f_y - M)² + Σ_{c≠y} f_c²), mean over examples. k = M = 1 is the plain one-hot
    regression; with many classes a larger k and M keep the true class from being drowned.
    """
    outputs = outputs.float()
    hot = functional.one_hot(labels, outputs.shape[-1]).to(outputs.dtype)
    weights = 1 + (k - 1) * hot
    return (weights * (outputs - m * hot).square()).mean(-1).mean()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over examples of (f - y)²: outputs (n, 1) or (n,), targets (n,)."""
    return functional.mse_loss(outputs.float().reshape(targets.shape), targets)


@torch.no_grad()
def count_correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """For how many examples the largest output is the label; stays on the device."""
    return (outputs.argmax(-1) == labels).sum()
