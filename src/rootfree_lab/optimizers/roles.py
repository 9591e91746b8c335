"""Which parameters of a model a matrix method takes, and which its companion."""

from __future__ import annotations

from typing import Any

from torch import nn

import rootfree
from rootfree_lab.models.vmamba import SelectiveScan2d

NamedParameters = list[tuple[str, nn.Parameter]]


def trainable(model: nn.Module) -> NamedParameters:
    """Every parameter that is trained, once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def groups_with_companion(model: nn.Module, **companion: Any) -> list[dict[str, Any]]:
    """Groups for our matrix methods; `companion` are the options of AdamW."""
    # Our own module keeps maps between features as bare parameters.
    maps = {
        f"{path}.{name}": {"companion": None}
        for path, module in model.named_modules()
        if isinstance(module, SelectiveScan2d)
        for name in ("x_proj", "dt_proj")
    }
    groups = rootfree.parameter_groups(model, no_decay_on_vectors=False, overrides=maps)
    return [{**group, **companion} if "companion" in group else group for group in groups]


def split_parameters(
    model: nn.Module, *, two_axes: bool = False
) -> tuple[NamedParameters, NamedParameters]:
    """(hidden matrices, the rest), as `rootfree.parameter_groups` tells them apart.

    With `two_axes` only parameters that are stored with exactly two axes count as matrices, so no
    convolutions. Where none is hidden, as in a network of convolutions, the head counts too.
    """
    groups = groups_with_companion(model)
    hidden = {p for group in groups if "companion" not in group for _, p in group["params"]}
    taken = {p for p in hidden if p.dim() == 2 or not two_axes}
    if two_axes and not taken:
        taken = {p for _, p in trainable(model) if p.dim() == 2}
    matrices = [(name, p) for name, p in trainable(model) if p in taken]
    return matrices, [(name, p) for name, p in trainable(model) if p not in taken]
