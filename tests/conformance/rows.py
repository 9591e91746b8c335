"""The table: every optimizer of the library, with the settings used on the small problems here.

Adding an optimizer is adding a row; every test of this folder then runs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import rootfree


@dataclass(frozen=True)
class Row:
    """One optimizer with settings; `make(params, **overrides)` builds it."""

    name: str
    optimizer: Callable[..., rootfree.RootFreeOptimizer]
    settings: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Any, **overrides: Any) -> rootfree.RootFreeOptimizer:
        return self.optimizer(params, **{"batch_size": 32, **self.settings, **overrides})


ROWS = [
    Row("RFRMSprop", rootfree.RFRMSprop, {"lr": 0.01, "weight_decay": 1e-4}),
    Row("RFRMSprop-plain", rootfree.RFRMSprop, {"lr": 0.05, "momentum": 0.0}),
    Row("RFRMSprop-bf16", rootfree.RFRMSprop, {"lr": 0.01, "state_dtype": torch.bfloat16}),
    Row("RFAdagrad", rootfree.RFAdagrad, {"lr": 0.5, "precond_lr": 0.05}),
    Row("RFAdamW", rootfree.RFAdamW, {"lr": 0.05, "weight_decay": 1e-3}),
    Row("RFAdamW-bf16", rootfree.RFAdamW, {"lr": 0.05, "state_dtype": torch.bfloat16}),
]
