"""batch_size as an option of groups: read and set in all of them; an error if it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch._compile import _disable_dynamo

from rootfree.shell.checks import positive_integer
from rootfree.shell.wrappers import still_untold, wrappers_around

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer

MISSING = (
    "batch_size is not set. It is the number of loss terms that the loss averages: images of a "
    "classification batch, tokens of a language model, over all micro-batches and ranks; 1 for a "
    "summed loss. Give batch_size=..., set optimizer.batch_size before step(), or count it with "
    "rootfree.track_batch_size(model, optimizer)."
)


def check_is_used(optimizer: RootFreeOptimizer) -> None:
    """Refuse a method whose steps have no batch size."""
    if "batch_size" not in optimizer.options:
        raise AttributeError(
            f"{type(optimizer).__name__} has no batch_size: its steps do not depend on how many "
            "terms the loss averages"
        )


def common_value(optimizer: RootFreeOptimizer) -> int | None:
    """The value in all groups that have it; an error if they differ."""
    check_is_used(optimizer)
    values = set(_values(optimizer.param_groups))
    if len(values) > 1:
        raise ValueError(
            f"the groups have different values of batch_size, {sorted(values, key=str)}: "
            "read it from param_groups"
        )
    return cast("int | None", next(iter(values), None))


def set_in_groups(optimizer: RootFreeOptimizer, value: int) -> None:
    """Set it in all groups that have it: those of AdamW do not.  Changes groups."""
    check_is_used(optimizer)
    checked = positive_integer("batch_size", value)
    for group in optimizer.param_groups:
        if "batch_size" in group:
            group["batch_size"] = checked


def ask_wrappers(optimizer: RootFreeOptimizer) -> None:
    """Warn if the batch size was set on a wrapper instead of the optimizer."""
    known, ours = optimizer._wrappers, _values(optimizer.param_groups)
    found = wrappers_around(optimizer) if known is None else known
    optimizer._wrappers = still_untold(found, ours) if ours else ()


@_disable_dynamo
def count(optimizer: RootFreeOptimizer) -> None:
    """Set it to the tracker's count."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    # Also without gradients on this rank: the others wait for its count.
    total = optimizer._batch_counter.take(needed=any(p.grad is not None for p in params))
    if total > 0:
        set_in_groups(optimizer, total)


def _values(groups: Sequence[dict[str, Any]]) -> list[Any]:
    return [group["batch_size"] for group in groups if "batch_size" in group]
