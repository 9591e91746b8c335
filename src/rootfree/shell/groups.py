"""Checks of parameter groups, before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rootfree.kernels.plan import kernel_devices
from rootfree.shell.companion import AdamW, check_companion

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer


def checked_group(optimizer: RootFreeOptimizer, param_group: dict[str, Any]) -> dict[str, Any]:
    """A group with all its options, checked."""
    if not isinstance(param_group, dict):
        raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
    name, has_companions = type(optimizer).__name__, optimizer._has_companions
    check_companion(param_group, optimizer.options, method=name, taken=has_companions)
    method = optimizer._of(param_group)
    defaults = {**optimizer.defaults, **({} if method is optimizer else AdamW.defaults)}
    group = {k: v for k, v in defaults.items() if k in method.options or k == "method"}
    group |= {**param_group, "params": as_list(param_group["params"])}
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    check_parameters(group["params"], known)
    for what, p in named(group["params"]) if optimizer._fused else ():
        if p.device.type not in kernel_devices(True):
            raise ValueError(f"fused must be None or False for {what} on {p.device}, got True")
    optimizer._pairs.check_group(group["params"])
    options = [*method.options, *(["companion"] if has_companions else [])]
    check_option_names(param_group, options, method=name)
    group |= method._checked_options(group)
    if optimizer._capturable and not isinstance(group["lr"], Tensor):
        device = next((p.device for _, p in named(group["params"])), None)
        group["lr"] = torch.tensor(group["lr"], device=device)
    return group


def as_list(params: Any) -> list[Any]:
    """The parameters of a group, in order."""
    refuse_model(params)
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, set):
        raise TypeError("params must have an order (a list, a generator), got a set")
    return list(params)


def refuse_model(params: Any) -> None:
    """A model in the place of its parameters: some can be iterated over, which gives layers."""
    if isinstance(params, nn.Module):
        raise TypeError(
            f"params must be parameters or groups, got a model ({type(params).__name__}): give "
            "model.parameters(), or rootfree.parameter_groups(model) to a matrix method"
        )


def named(params: list[Any]) -> Iterator[tuple[str, Any]]:
    """Each parameter with what error messages call it."""
    for i, entry in enumerate(params):
        name, p = entry if isinstance(entry, tuple) else (i, entry)
        shape = f" of shape {tuple(p.shape)}" if isinstance(p, Tensor) else ""
        yield f"parameter {name}{shape}", p


def check_parameters(params: list[Any], known: set[int]) -> None:
    """Refuse anything but real floating-point tensors, each given once (`known`: ids in use)."""
    known = set(known)
    for what, p in named(params):
        if not isinstance(p, Tensor):
            raise TypeError(f"{what} must be a Tensor, got {type(p).__name__}")
        if not p.is_floating_point():
            raise TypeError(f"{what} must have a real floating-point dtype, got {p.dtype}")
        if id(p) in known:
            raise ValueError(f"{what} is given twice; every parameter may be given once")
        known.add(id(p))


def check_option_names(given: Iterable[str], options: Collection[str], *, method: str) -> None:
    """Refuse a misspelt option, which would be silently ignored.

    Other unknown keys are allowed: schedulers, wrappers and users keep their own in groups.
    """
    for key in given:
        if key in options or key in ("params", "param_names", "method"):
            continue
        close = get_close_matches(key, options, n=1, cutoff=0.85)
        if close:
            raise ValueError(f"{method} has no option {key!r}; did you mean {close[0]!r}?")
