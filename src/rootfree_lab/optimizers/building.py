"""Optimizers by name: `build(name, model, batch_size=..., **options)`.

Options may be given in the words of this library for every method, and in a method's own. The words
are lr, precond_lr, momentum, riemannian_momentum, damping, weight_decay, update_every; AdamW's
`betas=(0.9, 0.999), eps=1e-8`, for example, is `momentum=0.9, precond_lr=0.001, damping=1e-8`.

A matrix method can leave the parameters that are not hidden matrices to a companion: `companion` is
the companion's name or "none", `companion_options` are its own options (its step size too). AdamW
beside a matrix method of this library is a group of the same optimizer; any other companion is an
optimizer of its own. The companion "parameter_groups" takes what `rootfree.parameter_groups(model)`
leaves to AdamW, as a user of the library begins; of its options there is `lr`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import rootfree
from rootfree_lab.config.reading import ConfigError, check_names
from rootfree_lab.optimizers.methods import METHODS, Method
from rootfree_lab.optimizers.roles import (
    NamedParameters,
    groups_with_companion,
    split_parameters,
    trainable,
)
from rootfree_lab.optimizers.words import translated

# The options of AdamW that a group has; with others (amsgrad, say) it is an optimizer of its own.
_OF_GROUPS = ("lr", "betas", "eps", "weight_decay")
_GROUPS = "parameter_groups"


def names() -> list[str]:
    """The names that `build` knows, those of packages that are not installed among them."""
    return list(METHODS)


def available(name: str) -> bool:
    """Whether the method is there: in the installed torch, or in a package that is installed."""
    package = _method(name).package
    if name == "Muon":  # in torch since 2.9
        return hasattr(torch.optim, "Muon")
    return package is None or find_spec(package) is not None


def build(name: str, model: nn.Module, *, batch_size: int, **options: Any) -> list[Optimizer]:
    """The optimizers that train the model, one, or two where there is a companion.

    `batch_size` is the number of loss terms that the loss averages, for the methods that need it.
    """
    method = _method(name)
    options, companion, companion_options = _apart(name, options)
    rest: NamedParameters = []
    inside = _inside(method, companion, companion_options)
    if inside is not None or companion == _GROUPS:
        parameters: Any = (
            _groups(model, companion_options)
            if inside is None
            else groups_with_companion(model, **inside)
        )
        if all("companion" in group for group in parameters):
            raise _no_matrices(name, companion)
    elif companion == "none":
        parameters = trainable(model)
        if method.two_axes and any(p.dim() != 2 for _, p in parameters):
            raise ConfigError(
                f"{name} takes parameters with two axes only: give the others a companion, got "
                "companion = 'none'"
            )
    else:
        parameters, rest = split_parameters(model, two_axes=method.two_axes)
        if not parameters:
            raise _no_matrices(name, companion)
    optimizers = [construct(name, parameters, batch_size=batch_size, **options)]
    if rest:
        optimizers.append(construct(companion, rest, batch_size=batch_size, **companion_options))
    return optimizers


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise what `build` would for an unknown name or option or a missing package; no model."""
    _method(name)
    if "batch_size" in options:
        raise ConfigError(
            f"optimizer.batch_size must not be given, got {options['batch_size']!r}: B is counted, "
            "from train.batch_size and the data"
        )
    options, companion, companion_options = _apart(name, options)
    for each, given in ((name, options), (companion, companion_options)):
        if each not in ("none", _GROUPS):
            _need(each)
            translated(each, inspect.signature(_method(each).load()).parameters, given)


def _method(name: str) -> Method:
    check_names("the optimizer", [name], METHODS)
    return METHODS[name]


def _need(name: str) -> None:
    if not available(name):
        package = _method(name).package or "torch>=2.9"
        raise ConfigError(f"{name} needs {package}: pip install '{package}'")


def _apart(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The method's own options; the companion's name and its options, checked."""
    method, own = METHODS[name], dict(options)
    companion = own.pop("companion", method.companion)
    theirs = own.pop("companion_options", {})
    allowed = ["none", *(other for other, each in METHODS.items() if not each.is_matrix)]
    allowed += [_GROUPS] if method.is_ours and method.is_matrix else []
    check_names("the companion", [str(companion)], allowed)
    if companion != "none" and not method.is_matrix:
        raise ConfigError(
            f"{name} takes every parameter, so companion must be 'none', got {companion!r}"
        )
    if not isinstance(theirs, Mapping):
        raise ConfigError(f"companion_options must be a table, got {theirs!r}")
    if theirs and companion == "none":
        raise ConfigError("companion_options are given, but companion is 'none'")
    if companion == _GROUPS:
        allowed = ["lr", "momentum", "precond_lr", "damping"]
        check_names(f"the option of the companion {_GROUPS},", theirs, allowed)
    return own, companion, dict(theirs)


def _inside(method: Method, companion: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Options of the groups that are left to AdamW; None: it is no group of the optimizer."""
    if companion != "AdamW" or not method.is_ours:
        return None
    signature = inspect.signature(torch.optim.AdamW).parameters
    defaults = {name: signature[name].default for name in _OF_GROUPS}
    values = {**defaults, **translated(companion, signature, options)}
    return values if values.keys() == defaults.keys() else None


def _groups(model: nn.Module, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of `rootfree.parameter_groups`, with the options that AdamW is given."""
    groups = rootfree.parameter_groups(model, companion_lr=options.pop("lr", None))
    given = translated("AdamW", inspect.signature(torch.optim.AdamW).parameters, options)
    return [{**group, **given} if "companion" in group else group for group in groups]


def _no_matrices(name: str, companion: str) -> ConfigError:
    return ConfigError(f"the model has no hidden matrices for {name}: all are left to {companion}")


def construct(name: str, parameters: Any, *, batch_size: int, **options: Any) -> Optimizer:
    """One optimizer of all these parameters: named ones, or groups of them."""
    method = _method(name)
    _need(name)
    constructor = method.load()
    signature = inspect.signature(constructor).parameters
    values = translated(name, signature, options)
    if "batch_size" in signature:
        values["batch_size"] = batch_size
    # Names show up in summaries; packages other than torch's and ours may not know them.
    params: Any = [p for _, p in parameters] if method.package else parameters
    try:
        optimizer: Optimizer = constructor(params, **values)
    except (IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error
    return optimizer
