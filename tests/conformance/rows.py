"""The table: every optimizer of the library, with the settings used on the small problems here.

Adding an optimizer is adding a row; every test of this folder then runs on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import rootfree
from conformance.curvatures import FromGradients


@dataclass(frozen=True)
class Row:
    """One optimizer with settings; `make(params, **overrides)` builds it."""

    name: str
    optimizer: type[rootfree.RootFreeOptimizer]
    settings: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Any, **overrides: Any) -> rootfree.RootFreeOptimizer:
        B = {"batch_size": 32} if self.has_batch_size else {}
        return self.optimizer(params, **{**B, **self.settings, **overrides})

    @property
    def has_batch_size(self) -> bool:
        return "batch_size" in self.optimizer.options


#: Limits that are felt in the first steps alone: the problems here are small, and convex ones far
#: from where they start.
LOOSE = {"max_update_rms": 1.0}
LOOSE_ELEMENTS = {"max_update": 1.0}

#: IF-Shampoo exactly as in the paper.
PAPER = {
    "structure": "dense",
    "block_size": None,
    "update_every": 1,
    "factor_norm": "frobenius",
    "init_scale": 1.0,
    "max_update_rms": None,
    "nesterov": False,
    "decoupled_weight_decay": False,
    "rate_by_rank": False,
}

#: The full-matrix rules of the paper.
BARE = {"momentum": 0.0, "nesterov": False, "precond_lr": 0.1, "safeguard": False}

ROWS = [
    Row("RFRMSprop", rootfree.RFRMSprop, {**LOOSE_ELEMENTS, "lr": 0.01, "weight_decay": 1e-4}),
    Row("RFRMSprop-plain", rootfree.RFRMSprop, {**LOOSE_ELEMENTS, "lr": 0.05, "momentum": 0.0}),
    Row(
        "RFRMSprop-bf16",
        rootfree.RFRMSprop,
        {**LOOSE_ELEMENTS, "lr": 0.01, "state_dtype": torch.bfloat16},
    ),
    Row(
        "RFRMSprop-nesterov",
        rootfree.RFRMSprop,
        {**LOOSE_ELEMENTS, "lr": 0.01, "weight_decay": 1e-4, "nesterov": True},
    ),
    Row("RFAdagrad", rootfree.RFAdagrad, {"lr": 0.5, "precond_lr": 0.05}),
    Row("RFAdamW", rootfree.RFAdamW, {**LOOSE_ELEMENTS, "lr": 0.05, "weight_decay": 1e-3}),
    Row(
        "RFAdamW-bf16",
        rootfree.RFAdamW,
        {**LOOSE_ELEMENTS, "lr": 0.05, "state_dtype": torch.bfloat16},
    ),
    Row("RFFullAdagrad", rootfree.RFFullAdagrad, {"lr": 0.06, "block_size": 64}),
    Row("RFFullAdagrad-paper", rootfree.RFFullAdagrad, {"lr": 1.0, "block_size": 64, **BARE}),
    Row(
        "RFFullRMSprop",
        rootfree.RFFullAdagrad,
        {"lr": 0.3, "gamma": 1.0, "damping": 0.01, **BARE},
    ),
    Row("IFFullAdagrad", rootfree.IFFullAdagrad, {"lr": 0.06, "block_size": 48}),
    Row("IFFullAdagrad-paper", rootfree.IFFullAdagrad, {"lr": 0.5, "block_size": 48, **BARE}),
    Row(
        "IFFullAdagrad-covariance",
        rootfree.IFFullAdagrad,
        {"lr": 0.5, "form": "covariance", **BARE, "momentum": 0.5},
    ),
    Row("RFShampoo", rootfree.RFShampoo, {**LOOSE, "lr": 0.01, "block_size": 32}),
    Row(
        "IFShampoo",
        rootfree.IFShampoo,
        {**LOOSE, "lr": 0.006, "block_size": 24, "weight_decay": 1e-4},
    ),
    Row("IFShampoo-paper", rootfree.IFShampoo, {**LOOSE, "lr": 0.01, "precond_lr": 0.5, **PAPER}),
    Row(
        "IFShampoo-rms",
        rootfree.IFShampoo,
        {**LOOSE, "lr": 0.05, "update_rms": 0.2, "weight_decay": 0.1},
    ),
    Row(
        "IFShampoo-nesterov",
        rootfree.IFShampoo,
        {
            **LOOSE,
            "lr": 0.006,
            "weight_decay": 1e-2,
            "nesterov": True,
            "decoupled_weight_decay": True,
        },
    ),
    Row(
        "IFShampoo-structured",
        rootfree.IFShampoo,
        {
            **LOOSE,
            "lr": 0.006,
            "riemannian_momentum": 0.5,
            "structure": {2: ("hierarchical:3", "lower_triangular"), 3: "block_diagonal:2"},
            "update_every": "logarithmic",
        },
    ),
    Row(
        "IFShampoo-bf16",
        rootfree.IFShampoo,
        {
            **LOOSE,
            "lr": 0.006,
            "factor_dtype": torch.bfloat16,
            "matmul_dtype": torch.bfloat16,
            "state_dtype": torch.bfloat16,
        },
    ),
    *[
        Row(
            f"IFShampoo-{form.replace(' ', '-')}",
            rootfree.IFShampoo,
            {**LOOSE, "lr": 0.006, "block_size": 24, "curvature": FromGradients(form)},
        )
        for form in ("outer products", "kronecker", "diagonal")
    ],
    Row("IFWhitening", rootfree.IFWhitening, {"lr": 0.05, "block_size": 24, "weight_decay": 0.01}),
    Row(
        "IFWhitening-structured",
        rootfree.IFWhitening,
        {
            "lr": 0.05,
            "structure": {2: ("diagonal", "block_diagonal:3")},
            "update_every": 3,
            "nesterov": False,
        },
    ),
    Row(
        "IFWhitening-bf16",
        rootfree.IFWhitening,
        {
            "lr": 0.05,
            "factor_dtype": torch.bfloat16,
            "matmul_dtype": torch.bfloat16,
            "state_dtype": torch.bfloat16,
        },
    ),
    Row(
        "IFWhitening-kronecker",
        rootfree.IFWhitening,
        {"lr": 0.05, "curvature": FromGradients("kronecker")},
    ),
    Row(
        "RFRMSprop-kronecker",
        rootfree.RFRMSprop,
        {**LOOSE_ELEMENTS, "lr": 0.01, "curvature": FromGradients("kronecker")},
    ),
]
