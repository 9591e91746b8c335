"""Matches the parts of a checkpoint to parameters, or raises an error that says what is wrong.

Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rootfree.shell.groups import named
from rootfree.shell.work import Group

#: a group, the checkpoint's values of it, the state of each parameter (None: left out, frozen)
Matched = tuple[Group, Group, list[Mapping[str, Any] | None]]


class StateMismatchError(ValueError):
    """A checkpoint of another optimizer, of other parameters, or broken."""


def match_state_dict(groups: Sequence[Group], state_dict: Any, *, method: str) -> list[Matched]:
    """For each group: the group, the checkpoint's values, the state of each parameter.

    The state is None for a frozen parameter that the checkpoint leaves out (sharded checkpoints
    may). Parameters correspond by position, as in torch.optim, unless both sides name the same
    parameters in another order.
    """
    states, saved_groups = _parts(state_dict)
    for saved in saved_groups:
        if (found := saved.get("method", "another optimizer")) != method:
            raise StateMismatchError(f"the checkpoint is of {found}, not of {method}")
    # First by name: where roles differ, so do the numbers of groups and of their parameters.
    _check_homes(groups, saved_groups, method)
    if len(saved_groups) != len(groups):
        raise StateMismatchError(
            f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
            + _left_to_adamw(groups, saved_groups)
        )
    matched = [
        _match_group(number, group, saved, states, method)
        for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True))
    ]
    _check_numbers([key for saved in saved_groups for key in saved["params"]], states)
    return matched


def foreign_entries(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """Entries of the state that belong to no parameter: wrappers keep theirs there."""
    # Distributed checkpoints call parameters by their names.
    claimed = {key for group in state_dict["param_groups"] for key in group["params"]}
    rows = state_dict["state"].items()
    return {key: row for key, row in rows if not isinstance(key, int) and key not in claimed}


def _parts(state_dict: Any) -> tuple[Mapping[Any, Any], list[Mapping[str, Any]]]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
        raise StateMismatchError(
            f"state_dict must have the keys 'state' and 'param_groups', got {str(found)[:200]}"
        )
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping):
        raise StateMismatchError(f"'state' must be a dict, got {type(states).__name__}")
    if not isinstance(groups, (list, tuple)):
        raise StateMismatchError(f"'param_groups' must be a list, got {type(groups).__name__}")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not all(isinstance(key, str) for key in group):
            raise StateMismatchError(f"group {number} must be a dict of options, got {group!r}")
        if not isinstance(group.get("params"), (list, tuple)):
            raise StateMismatchError(f"group {number} has no list 'params' in the checkpoint")
    return states, list(groups)


def _check_homes(
    groups: Sequence[Group], saved_groups: Sequence[Mapping[str, Any]], method: str
) -> None:
    """Refuse a parameter that is in another group of the checkpoint, by its name."""
    homes: dict[str, list[int]] = {}
    for number, saved in enumerate(saved_groups):
        for name in _names(number, saved) or ():
            homes.setdefault(name, []).append(number)
    moved = [
        (name, p, number, homes[name][0])
        for number, group in enumerate(groups)
        for name, p in zip(group.get("param_names", ()), group["params"], strict=False)
        if number not in homes.get(name, [number])
    ]
    for name, p, number, home in moved:
        _check_method([(name, p)], groups[number], saved_groups[home], number, method)
    if moved:
        name, _, number, home = moved[0]
        raise StateMismatchError(
            f"parameter {name} is in group {home} of the checkpoint and in group {number} of the "
            "optimizer"
        )


def _check_method(
    params: list[Any], group: Group, saved: Mapping[str, Any], number: int, method: str
) -> None:
    """Refuse parameters of AdamW where the checkpoint has those of the method, or the reverse."""
    theirs, mine = ("AdamW" if each.get("companion") else method for each in (saved, group))
    if theirs != mine:
        what, _ = next(named(params), (f"group {number}", 0))
        raise StateMismatchError(
            f"{what} is updated by {theirs} in the checkpoint and by {mine} in the optimizer: give "
            "its group the same `companion`"
        )


def _left_to_adamw(groups: Sequence[Group], saved_groups: Sequence[Mapping[str, Any]]) -> str:
    """A hint for when only one side has groups that are left to AdamW."""
    sides = {"checkpoint": saved_groups, "optimizer": groups}
    left = {
        side: [each for each in those if each.get("companion")] for side, those in sides.items()
    }
    if all(left.values()) or not any(left.values()):
        return ""
    side, (first, *_) = next((side, those) for side, those in left.items() if those)
    names = first.get("param_names") or ["some parameters"]
    return f"; the {side} leaves {names[0]} to AdamW, as rootfree.parameter_groups(model) does"


def _check_numbers(keys: list[Any], states: Mapping[Any, Any]) -> None:
    """Refuse a parameter that is listed twice, and state that belongs to no group."""
    if not all(isinstance(key, (int, str)) for key in keys) or len(set(keys)) < len(keys):
        raise StateMismatchError("'params' of the groups must name every parameter once")
    lost = [key for key in states if isinstance(key, int) and key not in set(keys)]
    if lost:
        raise StateMismatchError(f"the checkpoint has state for {lost[0]}, which is in no group")


def _match_group(
    number: int, group: Group, saved: Mapping[str, Any], states: Mapping[Any, Any], method: str
) -> Matched:
    if len(saved["params"]) != len(group["params"]):
        raise StateMismatchError(
            f"group {number} has {len(saved['params'])} parameters in the checkpoint, "
            f"{len(group['params'])} in the optimizer"
        )
    names = group.get("param_names") or saved["params"]
    _check_method([*zip(names, group["params"], strict=True)], group, saved, number, method)
    values = {k: v for k, v in saved.items() if k not in ("params", "param_names")}
    names = _names(number, saved)
    if names is not None and "param_names" not in group:
        values["param_names"] = names  # as torch does
    keys = _in_order(number, group, list(saved["params"]), names)
    rows = zip(keys, group["params"], strict=True)
    return group, values, [_state_of(key, p, states) for key, p in rows]


def _names(number: int, saved: Mapping[str, Any]) -> list[str] | None:
    if "param_names" not in saved:
        return None
    names = saved["param_names"]
    valid = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not valid or len(names) != len(saved["params"]):
        raise StateMismatchError(
            f"'param_names' of group {number} must be {len(saved['params'])} names, got {names!r}"
        )
    return list(names)


def _in_order(number: int, group: Group, keys: list[Any], theirs: list[str] | None) -> list[Any]:
    """The checkpoint's parameters in the order of the group's."""
    mine = group.get("param_names")
    if mine is None or theirs is None or mine == theirs:
        return keys
    if sorted(mine) == sorted(theirs) and len(set(mine)) == len(mine):
        by_name = dict(zip(theirs, keys, strict=True))
        return [by_name[name] for name in mine]
    # Renamed, by a wrapper's prefix for instance: by position, unless a name contradicts it.
    for i, name in enumerate(mine):
        if name in theirs and theirs.index(name) != i:
            raise StateMismatchError(
                f"group {number} has other parameters in the checkpoint than in the optimizer, in "
                f"another order: {name} is number {theirs.index(name)} there and {i} here"
            )
    return keys


def _state_of(key: Any, p: Tensor, states: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    state = states.get(key)
    if state is None and p.requires_grad:
        raise StateMismatchError(
            f"the checkpoint has no state for parameter {key} of shape {tuple(p.shape)}"
        )
    if state is not None and not (
        isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    ):
        raise StateMismatchError(f"the state of parameter {key} must be a dict, got {state!r}")
    return state
