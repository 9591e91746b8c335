"""State and checkpoints: the state of a parameter, and how a checkpoint is loaded into it.

A checkpoint is the same on every machine: factors are whole, whatever form kernels keep them in.
Loading is all or nothing: everything is checked before anything is copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rootfree.kernels.halves import joined, one_piece, write_
from rootfree.placement.canonical import mismatches, owned_rows
from rootfree.placement.homes import Home
from rootfree.placement.local import is_sharded
from rootfree.shell.checkpoint_matching import StateMismatchError, foreign_entries, match_state_dict
from rootfree.shell.groups import check_option_names
from rootfree.shell.options import OF_SOME_METHOD
from rootfree.shell.step_counts import CLOCK, LONG_AGO, has_a_past

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer

__all__ = ["StateMismatchError", "bring_state", "load_checkpoint"]

#: entries of the state, beside those of blocks, that are dropped when no option needs them
_OURS = ("momentum", "exp_avg", "exp_avg_sq")
#: squares and counts
_NOT_NEGATIVE = ("preconditioner", "exp_avg_sq", "mean_square", "unit", "first", "step", CLOCK)


def bring_state(
    optimizer: RootFreeOptimizer, p: Tensor, group: dict[str, Any]
) -> dict[str, Tensor]:
    """state[p], complete, with whole factors, on the device of `p`; missing entries start anew.

    Parameters and their state may be replaced between steps (pruning, growing, a moved model).
    """
    found = optimizer.state.get(p) or {}
    start = optimizer._of(group)._init_state(p, group)
    # Our entries are exactly those that the options need; wrappers keep their own.
    row = joined(found)
    if "step" in start and "preconditioner" in row and "step" not in row:  # from before counts
        row["step"] = torch.full_like(start["step"], LONG_AGO)
    for key in [k for k in row if k in _OURS or k.startswith("block")]:
        if key not in start:
            del row[key]
    for key, tensor in start.items():
        mine = tensor if row.get(key) is None else row[key]
        if not isinstance(mine, Tensor):  # a count, as torch once had them
            mine = torch.as_tensor(mine)
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


@torch.no_grad()
def load_checkpoint(optimizer: RootFreeOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Copy a checkpoint into an optimizer, or change nothing."""
    homes, method = optimizer._placing.homes, type(optimizer).__name__
    new: dict[Tensor, dict[str, Any]] = {}  # groups with the checkpoint's values, by parameter
    given: dict[Tensor, Mapping[str, Any]] = {}
    with _all_or_none(optimizer):
        matched = match_state_dict(optimizer.param_groups, state_dict, method=method)
        values = [_checked_values(optimizer, group, saved) for group, saved, _ in matched]
        for (group, saved, states), mine in zip(matched, values, strict=True):
            for p, state in zip(group["params"], states, strict=True):
                if state is not None:
                    new[p] = {**group, **mine, "step": saved.get("step", 0)}
                    given[p] = one_piece(state) if p in homes else state
        like = {p: _placed(optimizer, p, new[p]) for p in given if _is_placed(p, given[p], homes)}
        for problem in mismatches(like, homes, given):
            raise StateMismatchError(problem)
    given = {**given, **owned_rows(like, homes, {p: given[p] for p in like})}
    with _all_or_none(optimizer) as said:
        rows = [(p, *_fitting(optimizer, p, new[p], given[p])) for p in given]
        foreign = deepcopy(foreign_entries(state_dict))
        for group, saved, _ in matched:
            _tell_of_foreign_options(optimizer, group, saved)
        said["step"] = [int(whole["step"]) for _, _, whole, _ in rows if "step" in whole]
    # From here on nothing can fail.
    for p, mine, whole, others in rows:
        if has_a_past(whole):
            whole["step"] = torch.full_like(whole["step"], LONG_AGO)
        write_(mine, whole)
        mine.pop(CLOCK, None)  # of another checkpoint
        mine.update(others)
        optimizer.state[p] = mine
    optimizer.state.update(foreign)
    for (group, _, _), checked in zip(matched, values, strict=True):
        lr = group["lr"]
        group.update(checked)
        if isinstance(lr, Tensor):  # captured graphs and schedulers hold this very tensor
            group["lr"] = lr.copy_(torch.as_tensor(group["lr"]).reshape(lr.shape))


def _is_placed(p: Tensor, state: Mapping[str, Any], homes: Mapping[Tensor, Home]) -> bool:
    """Whether ranks have parts of the state of `p`, or of its saved state."""
    return p in homes or is_sharded(p) or any(map(is_sharded, state.values()))


def _placed(optimizer: RootFreeOptimizer, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors placed like the state of `p`; new ones where a checkpoint is divided into them."""
    if p in optimizer._placing.homes:
        return optimizer._of(group)._init_state(p, group)
    return optimizer.state.get(p) or {}


@contextmanager
def _all_or_none(optimizer: RootFreeOptimizer) -> Iterator[dict[str, Any]]:
    """Raise an error inside, where a checkpoint is checked, on all ranks.

    The values in the dict must be the same on all ranks.
    """
    problem: Exception | None = None
    said: dict[str, Any] = {}
    try:
        yield said
    except Exception as error:
        problem = error
    optimizer._placing.agreement.check("load_state_dict()", problem, StateMismatchError, **said)


def with_named_dtypes(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group as checkpoints have it: torch's checkpoint functions refuse dtypes as options."""
    return {k: str(v) if isinstance(v, torch.dtype) else v for k, v in group.items()}


def _with_dtypes(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse; a string that names no dtype stays, and is refused with other bad values."""
    named = {
        str(each): each for each in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    return {
        k: named.get(v, v) if k.endswith("_dtype") and isinstance(v, str) else v
        for k, v in saved.items()
    }


def _checked_values(
    optimizer: RootFreeOptimizer, group: dict[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """The values that the checkpoint puts into a group; others stay."""
    # Early checkpoints count refreshes by group, later ones by parameter (see `_fitting`).
    counted = saved.get("step", 0)
    if isinstance(counted, bool) or not isinstance(counted, int) or counted < 0:
        raise StateMismatchError(f"step must be a count in the checkpoint, got {counted!r}")
    values = {**group, **_with_dtypes(deepcopy(dict(saved)))}
    method = optimizer._of(values)
    check_option_names(saved, [*method.options, "companion"], method=type(optimizer).__name__)
    values.update(method._checked_options(values))
    left_out = {"step", *_foreign_options(optimizer, group, saved)}
    return {key: values[key] for key in saved if key not in left_out} | {"lr": values["lr"]}


def _foreign_options(
    optimizer: RootFreeOptimizer, group: dict[str, Any], saved: Mapping[str, Any]
) -> list[str]:
    """Options of another method: they are unchecked, and rules that methods share would read them.

    They are no reason to refuse: code that sets an option in every group leaves such a checkpoint.
    """
    return sorted(OF_SOME_METHOD & saved.keys() - group.keys() - optimizer.options.keys())


def _tell_of_foreign_options(
    optimizer: RootFreeOptimizer, group: dict[str, Any], saved: Mapping[str, Any]
) -> None:
    name = type(optimizer).__name__
    for key in _foreign_options(optimizer, group, saved):
        warnings.warn(
            f"the checkpoint has {key} = {saved[key]!r}, an option that {name} does not have: it "
            "is left out",
            stacklevel=4,
        )


def _fitting(
    optimizer: RootFreeOptimizer, p: Tensor, values: dict[str, Any], saved: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The state to write into (the one in use if it fits), what to write, and foreign entries."""
    fresh = optimizer._of(values)._init_state(p, values)
    whole, foreign = _divided(saved, fresh)
    if type(whole.get("step")) is int:  # as in old checkpoints of torch
        whole["step"] = torch.tensor(whole["step"], device="cpu")
    for key in [key for key in whole if key.endswith(".rounding") and key not in fresh]:
        del whole[key]  # factors of float64 parameters are not rounded
    for key, tensor in whole.items():
        if not isinstance(tensor, Tensor):
            raise StateMismatchError(
                f"state {key!r} of a parameter of shape {tuple(p.shape)} must be a tensor, got "
                f"{type(tensor).__name__}"
            )
    whole = one_piece(whole)
    if "step" in fresh:  # an early checkpoint has it in the group
        whole.setdefault("step", torch.tensor(values["step"], device="cpu"))
    if "momentum" in whole and "momentum" not in fresh:  # a scheduler turned momentum off
        fresh["momentum"] = torch.zeros_like(p, dtype=whole["momentum"].dtype)
    for key, tensor in whole.items():
        # A factor with an inverse beside it is S; a factor alone is K, which has no sign.
        inverse = key.replace(".factor", ".inverse")
        positive = ".inverse" in inverse and inverse in whole
        _check_tensor(key, tensor, fresh.get(key), p, positive=positive)
    if CLOCK in foreign and "step" in whole:
        clock = foreign[CLOCK]
        if not isinstance(clock, Tensor) or clock.shape != whole["step"].shape:
            raise StateMismatchError(f"state {CLOCK!r} must be a count, got {clock!r}")
        _check_tensor(CLOCK, clock, torch.zeros((), dtype=torch.int64), p)
    others = {key: _kept(value, p) for key, value in foreign.items()}
    for mine in (optimizer.state.get(p) or {}, fresh):
        if "momentum" in mine:  # a scheduler has turned momentum on since
            whole.setdefault("momentum", torch.zeros_like(mine["momentum"]))
        if _shapes(joined(_divided(mine, fresh)[0])) == _shapes(whole):
            return mine, whole, others
    raise StateMismatchError(
        f"the checkpoint's state {_shapes(whole)} does not fit a parameter of shape "
        f"{tuple(p.shape)}, which needs {_shapes(fresh)}"
    )


def _divided(
    state: Mapping[str, Any], fresh: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our entries, and those of wrappers."""
    mine = {k: v for k, v in state.items() if k in fresh or k in _OURS or k.startswith("block")}
    return mine, {key: value for key, value in state.items() if key not in mine}


def _kept(value: Any, p: Tensor) -> Any:
    return value.detach().clone().to(p.device) if isinstance(value, Tensor) else deepcopy(value)


def _check_tensor(
    key: str, tensor: Tensor, wanted: Tensor | None, p: Tensor, *, positive: bool = False
) -> None:
    """Refuse a tensor that copying would change, or that no step could have produced.

    `positive`: whether it must be positive definite.
    """
    what = f"state {key!r} of a parameter of shape {tuple(p.shape)}"
    narrow = tensor.is_floating_point() and tensor.itemsize < 2  # few functions support float8
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or narrow:
        found = f"{tensor.layout} of {tensor.dtype}"
        raise StateMismatchError(f"{what} must be a dense tensor with numbers, got {found}")
    if wanted is not None and key != "step" and _kind(tensor.dtype) != _kind(wanted.dtype):
        raise StateMismatchError(
            f"{what} must be of a dtype like {wanted.dtype}, got {tensor.dtype}"
        )
    local, name = getattr(tensor, "_local_tensor", tensor), key.rpartition(".")[2]
    if local.is_complex() or not bool(local.isfinite().all()):
        raise StateMismatchError(f"{what} has numbers that are complex or not finite")
    if wanted is not None and not bool(local.to(wanted.dtype).isfinite().all()):
        raise StateMismatchError(f"{what} has numbers beyond the range of {wanted.dtype}")
    if key == "step" and not bool((local == local.long()).all()):
        raise StateMismatchError(f"{what} must be a whole number")
    if name in _NOT_NEGATIVE and bool((local < 0).any()):
        raise StateMismatchError(f"{what} must not be negative")
    if local is not tensor:
        return  # some rows of a matrix allow no further checks
    matrices = local.dim() == 3  # else (b, d): diagonals
    diagonal = local.diagonal(dim1=-2, dim2=-1) if matrices else local
    if positive and not bool((diagonal > 0).all()):
        raise StateMismatchError(f"{what} must be positive definite")
    if name.startswith("factor") and local.numel() > 0 and not bool(local.any()):
        raise StateMismatchError(f"{what} must not be zero")


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex or dtype.is_floating_point:
        return "complex" if dtype.is_complex else "real"
    return "boolean" if dtype == torch.bool else "integer"


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}
