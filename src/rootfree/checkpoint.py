"""Does a checkpoint belong to these parameter groups? Answered before anything is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


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
