"""Where the parameters of a model are, and whether they are still there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rootfree.placement.unsharded import unsharded


def spots_of(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """(dict of a module, name, object) for every parameter, and every module that has parameters.

    Comparing these takes a fraction of the time of following the names of the parameters.
    """
    spots: list[tuple[Any, str, Any]] = []
    for module in model.modules():
        spots += [(module._parameters, name, p) for name, p in module._parameters.items()]
        for name, child in module.named_children():
            if next(child.parameters(), None) is not None:
                spots.append((module._modules, name, child))
    return spots


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
