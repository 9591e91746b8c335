"""State and checkpoints: what belongs to a parameter, and how a checkpoint gets into it.

A checkpoint is the same on every machine: factors are whole, whatever form the kernels keep them
in. Whether it fits is answered before anything is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rootfree.kernels.halves import joined, write_
from rootfree.shell.groups import named

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer


#: entries of the state, beside those of blocks, that go when the options need them no more
_OURS = ("momentum", "exp_avg", "exp_avg_sq")


class StateMismatchError(ValueError):
    """A checkpoint of another optimizer, or of other parameters."""


Matched = tuple[dict[str, Any], dict[str, Any], list[Mapping[str, Tensor] | None]]


def match_state_dict(
    groups: list[dict[str, Any]], state_dict: Mapping[str, Any], *, method: str
) -> list[Matched]:
    """For each group: the group, the checkpoint's option values, the state of each parameter.

    The state is None for a frozen parameter that the checkpoint leaves out (sharded checkpoints
    may). Parameters correspond by position, as in torch.optim.
    """
    if not {"state", "param_groups"} <= set(state_dict):
        raise StateMismatchError(
            f"state_dict must have the keys 'state' and 'param_groups', got {sorted(state_dict)}"
        )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise StateMismatchError(
            f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
        )
    return [
        _match_group(number, group, saved, state_dict["state"], method)
        for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True))
    ]


def _match_group(
    number: int,
    group: dict[str, Any],
    saved: Mapping[str, Any],
    states: Mapping[int, Mapping[str, Tensor]],
    method: str,
) -> Matched:
    found = saved.get("method", "another optimizer")
    if found != method:
        raise StateMismatchError(f"the checkpoint is of {found}, not of {method}")
    if len(saved["params"]) != len(group["params"]):
        raise StateMismatchError(
            f"group {number} has {len(saved['params'])} parameters in the checkpoint, "
            f"{len(group['params'])} in the optimizer"
        )
    theirs, mine = ("AdamW" if each.get("companion") else method for each in (saved, group))
    if theirs != mine:
        names = group.get("param_names") or saved["params"]
        what, _ = next(named([*zip(names, group["params"], strict=True)]), (f"group {number}", 0))
        raise StateMismatchError(
            f"{what} is updated by {theirs} in the checkpoint and by {mine} in the optimizer: give "
            "its group the same `companion`"
        )
    matched: list[Mapping[str, Tensor] | None] = []
    for key, p in zip(saved["params"], group["params"], strict=True):
        state = states.get(key)
        if state is None and p.requires_grad:
            raise StateMismatchError(
                f"the checkpoint has no state for parameter {key} of shape {tuple(p.shape)}"
            )
        matched.append(state)
    values = {k: v for k, v in saved.items() if k not in ("params", "param_names")}
    return group, values, matched


def bring_state(
    optimizer: RootFreeOptimizer, p: Tensor, group: dict[str, Any]
) -> dict[str, Tensor]:
    """state[p], complete, in one piece and where `p` is; what is missing starts anew.

    Parameters and their state may be replaced between steps (pruning, growing, a moved model).
    """
    found = optimizer.state.get(p) or {}
    start = optimizer._of(group)._init_state(p, group)
    # What is ours is exactly what the options ask for; wrappers keep entries of theirs.
    row = joined(found)
    for key in [k for k in row if k in _OURS or k.startswith("block")]:
        if key not in start:
            del row[key]
    for key, tensor in start.items():
        mine = row.setdefault(key, tensor)
        if mine.shape != tensor.shape:
            raise RuntimeError(
                f"state {key!r} of a parameter of shape {tuple(p.shape)} has shape "
                f"{tuple(mine.shape)}, but must have {tuple(tensor.shape)}; a parameter, its "
                "state, `structure` or `block_size` was replaced. Without its entry in "
                "optimizer.state the parameter starts anew"
            )
        row[key] = mine.to(tensor.device, tensor.dtype)
    if found.keys() == row.keys() and all(found[key] is row[key] for key in row):
        return found
    return row


def load_checkpoint(optimizer: RootFreeOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Copy a checkpoint into an optimizer."""
    pairs = match_state_dict(optimizer.param_groups, state_dict, method=type(optimizer).__name__)
    plan = []
    for group, saved_group, saved_states in pairs:
        values = {**group, **saved_group}
        values.update(optimizer._of(values)._checked_options(values))
        for p, saved in zip(group["params"], saved_states, strict=True):
            if saved is not None:
                plan.append((p, *_fitting(optimizer, p, values, saved)))
    for p, mine, saved in plan:
        write_(mine, saved)
        optimizer.state[p] = mine
    for group, saved_group, _ in pairs:
        lr = group["lr"]
        # Refreshes were counted by group once; now they are by parameter.
        group.update({key: value for key, value in saved_group.items() if key != "step"})
        if isinstance(lr, Tensor):  # captured graphs and schedulers hold this very tensor
            group["lr"] = lr.copy_(torch.as_tensor(saved_group["lr"]))


def _fitting(
    optimizer: RootFreeOptimizer, p: Tensor, values: dict[str, Any], saved: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State of p that the saved one can be written into (the one in use if it fits), and that."""
    whole, fresh = joined(saved), optimizer._of(values)._init_state(p, values)
    if "step" in fresh:  # written when groups counted, the checkpoint has it there
        whole.setdefault("step", torch.tensor(values.get("step", 0)))
    if "momentum" in whole and "momentum" not in fresh:  # a scheduler turned it off
        fresh["momentum"] = torch.zeros_like(p, dtype=whole["momentum"].dtype)
    for mine in (optimizer.state.get(p) or {}, fresh):
        if "momentum" in mine:  # a scheduler turned it on since
            whole.setdefault("momentum", torch.zeros_like(mine["momentum"]))
        if _shapes(joined(mine)) == _shapes(whole):
            return mine, whole
    raise StateMismatchError(
        f"the checkpoint's state {_shapes(saved)} does not fit a parameter of shape "
        f"{tuple(p.shape)}, which needs {_shapes(fresh)}"
    )


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}
