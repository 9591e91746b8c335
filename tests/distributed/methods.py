"""The optimizers that are tried on ranks, with options that leave no part of a step out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import rootfree


def if_shampoo(params: Any, **given: Any) -> rootfree.IFShampoo:
    """Cap, decay, Riemannian momentum, blocks of several shapes."""
    options = {"batch_size": 8, "block_size": 16, "weight_decay": 0.1, "riemannian_momentum": 0.5}
    return rootfree.IFShampoo(params, lr=1e-2, **{**options, **given})


def rf_shampoo(params: Any, **given: Any) -> rootfree.RFShampoo:
    return rootfree.RFShampoo(params, lr=1e-2, batch_size=8, block_size=16, max_update=0.1, **given)


def whitening(params: Any, **given: Any) -> rootfree.IFWhitening:
    """Steps of a given root mean square."""
    return rootfree.IFWhitening(params, lr=1e-2, block_size=16, weight_decay=0.1, **given)


def if_full(params: Any, **given: Any) -> rootfree.IFFullAdagrad:
    """Parameters as vectors: a shard of columns is many runs of one."""
    return rootfree.IFFullAdagrad(params, batch_size=8, block_size=32, **given)


def rf_full(params: Any, **given: Any) -> rootfree.RFFullAdagrad:
    return rootfree.RFFullAdagrad(params, batch_size=8, block_size=32, damping=1e-3, **given)


def rms_prop(params: Any) -> rootfree.RFRMSprop:
    """Element by element: under tensor parallelism with whole parameters in the same group."""
    return rootfree.RFRMSprop(params, lr=1e-2, batch_size=8, weight_decay=0.1)


def with_companion(model: nn.Module, **given: Any) -> rootfree.IFWhitening:
    groups = rootfree.parameter_groups(model, weight_decay=0.1)
    return rootfree.IFWhitening(groups, lr=1e-2, block_size=16, **given)


MATRIX = {
    "IFShampoo": if_shampoo, "RFShampoo": rf_shampoo, "IFWhitening": whitening,
    "IFFullAdagrad": if_full, "RFFullAdagrad": rf_full,
}  # fmt: skip
BF16 = torch.bfloat16
