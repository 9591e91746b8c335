"""Optimizers from other packages, imported when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# Packages whose optimizers keep state beside `state_dict()`: a resumed run would be another one.
_NOT_RESUMABLE = ("sirfshampoo",)


def sirfshampoo() -> Any:
    """The published inverse-free Shampoo, behind a constructor that takes parameters alone."""
    module = importlib.import_module("sirfshampoo")

    def build(
        params: Iterable[nn.Parameter],
        *,
        batch_size: int,
        lr: float = 0.001,
        beta2: float = 0.01,
        alpha1: float = 0.9,
        alpha2: float = 0.5,
        lam: float = 0.001,
        kappa: float = 0.0,
        T: int = 1,
        preconditioner_dtypes: torch.dtype | None = None,
    ) -> Optimizer:
        parameters = list(params)
        optimizer: Optimizer = module.SIRFShampoo(
            nn.ParameterList(parameters),
            params=parameters,
            lr=lr,
            beta2=beta2,
            alpha1=alpha1,
            alpha2=alpha2,
            lam=lam,
            kappa=kappa,
            batch_size=batch_size,
            T=T,
            preconditioner_dtypes=preconditioner_dtypes,
        )
        return optimizer

    return build


def pytorch_optimizer(name: str) -> Any:
    """A class of `pytorch_optimizer`."""
    return getattr(importlib.import_module("pytorch_optimizer"), name)


def heavyball(name: str) -> Any:
    """A class of `heavyball`."""
    module = importlib.import_module("heavyball")
    if not torch.cuda.is_available():
        # It compiles every update. On a processor that takes minutes before the first step.
        importlib.import_module("heavyball.utils").compile_mode = None  # type: ignore[attr-defined]
    return getattr(module, name)


def not_resumable(optimizers: Iterable[Optimizer]) -> str | None:
    """The name of an optimizer that cannot be restored from its state_dict, if there is one."""
    kinds = map(type, optimizers)
    return next((k.__name__ for k in kinds if k.__module__.split(".")[0] in _NOT_RESUMABLE), None)
