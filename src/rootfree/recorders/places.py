"""Where the parameters of a model are, and whether they are still there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from rootfree.placement.unsharded import unsharded


def spots_of(model: nn.Module, names: Iterable[str]) -> list[tuple[Any, str, Any]]:
    """(dict of a module, name, object) for every module and parameter on the way to the names.

    Comparing these takes a fraction of the time of following the names.
    """
    spots: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for path in (name.split(".") for name in names):
        found: Any = model
        for i, name in enumerate(path):
            place = getattr(found, "_modules" if i < len(path) - 1 else "_parameters", {})
            found = place.get(name, place)  # where it is not there, what it can never be
            spots[id(place), name] = (place, name, found)
    return list(spots.values())


def replaced_in(model: nn.Module, names: dict[Tensor, str]) -> str | None:
    """The name of a parameter that was replaced; None: none was."""
    for p, name in names.items():
        found: Any = model
        for each in name.split("."):
            found = getattr(found, each, None)
        # Between forward and backward FSDP2 may have the whole parameter in its place.
        if found is not p and found is not unsharded(model).get(id(p), p):
            return name
    return None
