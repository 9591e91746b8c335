"""What ranks that have an optimizer in common say to each other."""

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

#: what is said of a tracker of the batch size
COUNTING = "whether track_batch_size counts"


def labelled(options: list[Group], counting: bool, trouble: str | None) -> dict[str, Any]:
    """What must be the same on all ranks before a step, by what it is; `options`: of all groups."""
    if trouble is not None:
        return {PROBLEM: trouble}
    found = {
        f"{name} of parameter group {n}": value
        for n, group in enumerate(options)
        for name, value in group.items()
    }
    return {**found, COUNTING: counting}


def asked(optimizer: RootFreeOptimizer) -> dict[str, Any]:
    """What was asked for beside the options of groups, by what it is."""
    return {
        "nonfinite": optimizer._watch.mode,
        "fused": optimizer._fused,
        "curvature": optimizer._curvature and optimizer._curvature.name,
    }


def plain_options(group: Group) -> dict[str, Any]:
    """The options of a group that ranks can compare, and hosts look at without waiting.

    Keys that are not ours may hold anything; what they hold of the plain kinds is compared too.
    """
    found = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            value = value.item()  # a learning rate
        if name not in ("params", "param_names") and isinstance(value, _PLAIN):
            found[name] = value
    return found


def description_of(params: Sequence[Tensor]) -> str:
    """What parameters they are, for ranks that may not know of each other yet."""
    return str(digest([(tuple(p.shape), p.dtype) for p in params]))


def tensors_in(params: Any) -> list[Tensor]:
    """The tensors of what an optimizer was given, whether it is right or not."""
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, dict):
        return tensors_in(params.get("params", ()))
    found = params if isinstance(params, (list, tuple)) else ()
    return [tensor for each in found for tensor in tensors_in(each)]
