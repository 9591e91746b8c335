"""Optimizers from other packages, imported when they are asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# Packages whose optimizers keep state beside `state_dict()`: a resumed run would be another one.
_NOT_RESUMABLE = ("sirfshampoo",)


def sirfshampoo() -> Any:
    """The published inverse-free Shampoo, behind a constructor that takes parameters alone.

    The package registers dense factors alone. Diagonal ones of `singd`, which it needs, fit too.
    """
    published = importlib.import_module("sirfshampoo").SIRFShampoo
    diagonal = importlib.import_module("singd.structures.diagonal").DiagonalMatrix
    known = {**published.SUPPORTED_STRUCTURES, "diagonal": diagonal}
    own = {"SUPPORTED_STRUCTURES": known, "__module__": published.__module__}
    published = type("SIRFShampoo", (published,), own)
    signature = inspect.signature(published)

    def build(params: Iterable[nn.Parameter], **options: Any) -> Any:
        parameters = list(params)
        return published(nn.ParameterList(parameters), params=parameters, **options)

    taken = [p for name, p in signature.parameters.items() if name not in ("model", "verbose_init")]
    vars(build)["__signature__"] = signature.replace(parameters=taken)
    return build


def load(package: str, name: str) -> Any:
    """A class of another package."""
    module = importlib.import_module(package)
    if package == "heavyball" and not torch.cuda.is_available():
        # It compiles every update. On a processor that takes minutes before the first step.
        importlib.import_module("heavyball.utils").compile_mode = None  # type: ignore[attr-defined]
    return getattr(module, name)


def not_resumable(optimizers: Iterable[Optimizer]) -> str | None:
    """The name of an optimizer that cannot be restored from its state_dict, if there is one."""
    kinds = map(type, optimizers)
    return next((k.__name__ for k in kinds if k.__module__.split(".")[0] in _NOT_RESUMABLE), None)
