"""What ranks with common parameters tell each other about an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rootfree.placement.processes import digest
from rootfree.placement.ranks import PROBLEM
from rootfree.shell.work import Group

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer

_PLAIN = (bool, int, float, str, tuple, torch.dtype, type(None))

#: the label of "is there a tracker of the batch size"
COUNTING = "whether track_batch_size counts"


def labelled(options: list[Group], counting: bool, trouble: str | None) -> dict[str, Any]:
    """Labels and values that must be the same on all ranks before a step, or the trouble."""
    if trouble is not None:
        return {PROBLEM: trouble}
    found = {
        f"{name} of parameter group {n}": value
        for n, group in enumerate(options)
        for name, value in group.items()
    }
    return {**found, COUNTING: counting}


def asked(optimizer: RootFreeOptimizer) -> dict[str, Any]:
    """Arguments of the optimizer that are not options of groups."""
    return {
        "nonfinite": optimizer._watch.mode,
        "fused": optimizer._fused,
        "curvature": optimizer._curvature and optimizer._curvature.name,
    }


def plain_options(group: Group) -> dict[str, Any]:
    """The options of a group that ranks can compare, without waiting for a device.

    Keys that are not ours may hold anything; their plain values are compared too.
    """
    found = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            value = value.item()  # a learning rate
        if name not in ("params", "param_names") and isinstance(value, _PLAIN):
            found[name] = value
    return found


def description_of(params: Sequence[Tensor]) -> str:
    """A digest of shapes and dtypes, by which ranks recognise the same parameters."""
    return str(digest([(tuple(p.shape), p.dtype) for p in params]))


def parameters_in(params: Any) -> list[Tensor]:
    """The tensors among the parameters given to an optimizer, which may be invalid."""
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, dict):
        return parameters_in(params.get("params", ()))
    found = params if isinstance(params, (list, tuple)) else ()
    return [tensor for each in found for tensor in parameters_in(each)]
