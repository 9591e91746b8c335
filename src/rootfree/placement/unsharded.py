"""What FSDP2 makes of parameters inside forward and backward: plain tensors that autograd knows.

torch says none of this in public: it is read from FSDP2's own records here, and pinned by the tests
that train with recorders on ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rootfree.placement.local import is_sharded


def fsdp_groups(model: nn.Module) -> list[Any]:
    """The groups of parameters that `fully_shard` made of a model."""
    modules: list[Any] = list(model.modules())
    states = [m._get_fsdp_state() for m in modules if hasattr(m, "_get_fsdp_state")]
    return [group for state in states for group in state._fsdp_param_groups]


def unsharded(model: nn.Module) -> dict[int, Tensor]:
    """By id of a sharded parameter: the whole one that was last used in its place."""
    return {
        id(each.sharded_param): each._unsharded_param
        for group in fsdp_groups(model)
        for each in group.fsdp_params
        if hasattr(each, "_unsharded_param")
    }


def split_inside(model: nn.Module) -> list[str]:
    """Names of parameters that layers use in parts: by tensor parallelism, not by FSDP2 alone."""
    whole_inside = {
        id(each.sharded_param)
        for group in fsdp_groups(model)
        for each in group.fsdp_params
        if not each.is_dtensor
    }
    params = model.named_parameters()
    return [name for name, p in params if is_sharded(p) and id(p) not in whole_inside]


def gradient_divisor(model: nn.Module, ranks: int) -> float:
    """By what the sum of the ranks' gradients is divided: their number, unless FSDP2 was told."""
    factors = {group.gradient_divide_factor for group in fsdp_groups(model)} or {None}
    if len(factors) > 1:
        raise RuntimeError(
            "set_gradient_divide_factor must have been given one value for the whole model, got "
            + ", ".join(sorted(str(factor) for factor in factors))
        )
    factor = factors.pop()
    return float(ranks if factor is None else factor)
