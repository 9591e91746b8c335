"""The plain tensors that FSDP2 uses in place of sharded parameters in forward and backward.

None of this is public in torch: it is read from private attributes of FSDP2, and pinned by the
tests that train with recorders on ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rootfree.placement.local import is_sharded


def fsdp_groups(model: nn.Module) -> list[Any]:
    """The parameter groups that `fully_shard` made for a model."""
    modules: list[Any] = list(model.modules())
    states = [m._get_fsdp_state() for m in modules if hasattr(m, "_get_fsdp_state")]
    return [group for state in states for group in state._fsdp_param_groups]


def unsharded(model: nn.Module) -> dict[int, Tensor]:
    """The whole tensor that was last used in place of each sharded parameter, by its id."""
    return {
        id(each.sharded_param): each._unsharded_param
        for group in fsdp_groups(model)
        for each in group.fsdp_params
        if hasattr(each, "_unsharded_param")
    }


def split_inside(model: nn.Module) -> list[str]:
    """Names of parameters that are still sharded inside layers: by tensor parallelism."""
    whole_inside = {
        id(each.sharded_param)
        for group in fsdp_groups(model)
        for each in group.fsdp_params
        if not each.is_dtensor
    }
    params = model.named_parameters()
    return [name for name, p in params if is_sharded(p) and id(p) not in whole_inside]


def gradient_divisor(model: nn.Module, ranks: int) -> float:
    """The divisor of the sum of gradients: the number of ranks, unless FSDP2 has another one."""
    factors = {group.gradient_divide_factor for group in fsdp_groups(model)} or {None}
    if len(factors) > 1:
        raise RuntimeError(
            "set_gradient_divide_factor must have been given one value for the whole model, got "
            + ", ".join(sorted(str(factor) for factor in factors))
        )
    factor = factors.pop()
    return float(ranks if factor is None else factor)
