"""Optimizers by name: `build(name, model, batch_size=..., **options)`.

Options may be given in the words of this library for every method, and in a method's own. The words
are lr, precond_lr, momentum, riemannian_momentum, damping, weight_decay, update_every; AdamW's
`betas=(0.9, 0.999), eps=1e-8`, for example, is `momentum=0.9, precond_lr=0.001, damping=1e-8`.

A matrix method can leave the parameters that are not hidden matrices to a companion: `companion` is
the companion's name or "none", `companion_options` are its own options (its step size too). AdamW
beside a matrix method of this library is a group of the same optimizer; any other companion is an
optimizer of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import rootfree
from rootfree_lab import baselines, peers
from rootfree_lab.config_reading import ConfigError, unknown_name
from rootfree_lab.parameter_roles import (
    NamedParameters,
    groups_with_companion,
    split_parameters,
    trainable,
)

__all__ = ["available", "build", "check", "names"]

# A word's place among a method's own options: a name; a name whose value is one minus ours; or an
# element of `betas`, likewise.
_RENAMED, _ONE_MINUS = "renamed", "one minus"
Place = tuple[str, str] | tuple[str, str, int]

_ADAM: dict[str, Place] = {
    "momentum": (_RENAMED, "betas", 0),
    "precond_lr": (_ONE_MINUS, "betas", 1),
    "damping": (_RENAMED, "eps"),
}
# The options of AdamW that a group has; with others (amsgrad, say) it is an optimizer of its own.
_OF_GROUPS = ("lr", "betas", "eps", "weight_decay")
_SOAP: dict[str, Place] = {**_ADAM, "update_every": (_RENAMED, "precondition_frequency")}


@dataclass(frozen=True)
class Method:
    """How one name of the registry is built."""

    load: Callable[[], Any]  # imports, where it has to, and returns the constructor
    words: Mapping[str, Place] = field(default_factory=dict)
    is_matrix: bool = False  # may have a companion
    is_ours: bool = False  # of this library: AdamW may be a group of it
    two_axes: bool = False  # takes parameters with exactly two axes only
    companion: str = "none"  # by default
    package: str | None = None  # that has to be installed


def _given(constructor: Any) -> Callable[[], Any]:
    return lambda: constructor


def _methods() -> dict[str, Method]:
    methods = {
        "SGD": Method(_given(torch.optim.SGD)),
        "RMSprop": Method(
            _given(torch.optim.RMSprop),
            words={"precond_lr": (_ONE_MINUS, "alpha"), "damping": (_RENAMED, "eps")},
        ),
        "AdamW": Method(_given(torch.optim.AdamW), words=_ADAM),
        "Adagrad": Method(_given(torch.optim.Adagrad), words={"damping": (_RENAMED, "eps")}),
        "Muon": Method(lambda: torch.optim.Muon, is_matrix=True, two_axes=True, companion="AdamW"),
        "Shampoo": Method(_given(baselines.Shampoo), is_matrix=True),
        "FullAdagrad": Method(_given(baselines.FullAdagrad), is_matrix=True),
    }
    diagonal = (rootfree.RFRMSprop, rootfree.RFAdagrad, rootfree.RFAdamW)
    matrix = (
        rootfree.RFFullAdagrad,
        rootfree.IFFullAdagrad,
        rootfree.RFShampoo,
        rootfree.IFShampoo,
        rootfree.IFWhitening,
    )
    for ours in (*diagonal, *matrix):
        words = (
            {word: _ADAM[word] for word in ("momentum", "precond_lr")}
            if ours is rootfree.RFAdamW
            else {}
        )
        method = partial(Method, words=words, is_matrix=ours in matrix, is_ours=True)
        methods[ours.__name__] = method(_given(ours))
        if "batch_size" in ours.options:
            methods[f"{ours.__name__}-no-B"] = method(partial(baselines.without_batch_size, ours))
        if ours in diagonal or ours is rootfree.RFFullAdagrad:
            methods[f"{ours.__name__}-zero-init"] = method(
                partial(baselines.zero_initialised, ours)
            )
    soap = partial(Method, words=_SOAP, is_matrix=True)
    methods |= {
        "sirfshampoo": Method(
            peers.sirfshampoo,
            words={
                "precond_lr": (_RENAMED, "beta2"),
                "momentum": (_RENAMED, "alpha1"),
                "riemannian_momentum": (_RENAMED, "alpha2"),
                "damping": (_RENAMED, "lam"),
                "weight_decay": (_RENAMED, "kappa"),
                "update_every": (_RENAMED, "T"),
                "factor_dtype": (_RENAMED, "preconditioner_dtypes"),
            },
            is_matrix=True,
            package="sirfshampoo",
        ),
        "pytorch_optimizer.SOAP": soap(
            partial(peers.pytorch_optimizer, "SOAP"), package="pytorch_optimizer"
        ),
        "pytorch_optimizer.Kron": Method(
            partial(peers.pytorch_optimizer, "Kron"), is_matrix=True, package="pytorch_optimizer"
        ),
        "pytorch_optimizer.ScalableShampoo": Method(
            partial(peers.pytorch_optimizer, "ScalableShampoo"),
            is_matrix=True,
            package="pytorch_optimizer",
        ),
        "heavyball.SOAP": soap(partial(peers.heavyball, "SOAP"), package="heavyball"),
        "heavyball.PSGDKron": Method(
            partial(peers.heavyball, "PSGDKron"), is_matrix=True, package="heavyball"
        ),
    }
    return methods


_METHODS = _methods()


def names() -> list[str]:
    """The names that `build` knows, those of packages that are not installed among them."""
    return list(_METHODS)


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
    if inside is not None:
        parameters: Any = groups_with_companion(model, **inside)
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
    optimizers = [_construct(name, parameters, batch_size, options)]
    if rest:
        optimizers.append(_construct(companion, rest, batch_size, companion_options))
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
        if each != "none":
            _need(each)
            _translated(each, inspect.signature(_method(each).load()).parameters, given)


def _method(name: str) -> Method:
    if name not in _METHODS:
        raise unknown_name("the optimizer", name, names())
    return _METHODS[name]


def _need(name: str) -> None:
    if not available(name):
        package = _method(name).package or "torch>=2.9"
        raise ConfigError(f"{name} needs {package}: pip install '{package}'")


def _apart(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The method's own options, the companion's name, and its options."""
    own = {key: value for key, value in options.items() if not key.startswith("companion")}
    return own, *_companion(name, options)


def _companion(name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The companion's name and options, checked."""
    method = _METHODS[name]
    companion = options.get("companion", method.companion)
    own = options.get("companion_options", {})
    allowed = ["none", *(other for other, each in _METHODS.items() if not each.is_matrix)]
    if companion not in allowed:
        raise unknown_name("the companion", str(companion), allowed)
    if companion != "none" and not method.is_matrix:
        raise ConfigError(
            f"{name} takes every parameter, so companion must be 'none', got {companion!r}"
        )
    if not isinstance(own, Mapping):
        raise ConfigError(f"companion_options must be a table, got {own!r}")
    if own and companion == "none":
        raise ConfigError("companion_options are given, but companion is 'none'")
    return companion, dict(own)


def _inside(method: Method, companion: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Options of the groups that are left to AdamW; None: it is no group of the optimizer."""
    if companion != "AdamW" or not method.is_ours:
        return None
    signature = inspect.signature(torch.optim.AdamW).parameters
    defaults = {name: signature[name].default for name in _OF_GROUPS}
    values = {**defaults, **_translated(companion, signature, options)}
    return values if values.keys() == defaults.keys() else None


def _no_matrices(name: str, companion: str) -> ConfigError:
    return ConfigError(f"the model has no hidden matrices for {name}: all are left to {companion}")


def _construct(
    name: str, parameters: Any, batch_size: int, options: Mapping[str, Any]
) -> Optimizer:
    """`parameters`: named ones, or groups of them."""
    method = _method(name)
    _need(name)
    constructor = method.load()
    signature = inspect.signature(constructor).parameters
    values = _translated(name, signature, options)
    if "batch_size" in signature:
        values["batch_size"] = batch_size
    # Names show up in summaries; packages other than torch's and ours may not know them.
    params: Any = [p for _, p in parameters] if method.package else parameters
    try:
        optimizer: Optimizer = constructor(params, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error
    return optimizer


def _translated(
    name: str, signature: Mapping[str, inspect.Parameter], options: Mapping[str, Any]
) -> dict[str, Any]:
    """A method's own options, from those and the common words."""
    words = _METHODS[name].words
    own = [
        key
        for key, parameter in signature.items()
        if key not in ("params", "batch_size") and parameter.kind is not parameter.VAR_KEYWORD
    ]
    prefix = ("companion", "companion_options") if _METHODS[name].is_matrix else ()
    allowed = list(dict.fromkeys([*own, *words, *prefix]))
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in allowed:
            raise unknown_name(f"the option of {name},", key, allowed)
        if key in own:
            if isinstance(signature[key].default, float):
                _check_number(name, key, value)
            values[key] = _plain(key, value)
    for word, place in words.items():
        if word in options and word not in own:
            _place(name, word, options, place, values, signature)
    return values


def _place(
    name: str,
    word: str,
    options: Mapping[str, Any],
    place: Place,
    values: dict[str, Any],
    signature: Mapping[str, inspect.Parameter],
) -> None:
    """Write one common word where the method keeps it.  Changes `values`."""
    how, key = place[:2]
    if key in options:
        raise ConfigError(f"{name}: {word} and {key} are the same thing; give one of them")
    if how == _ONE_MINUS:
        _check_number(name, word, options[word])
    value = 1 - options[word] if how == _ONE_MINUS else _plain(word, options[word])
    if len(place) == 2:
        values[key] = value
        return
    pair = list(values.get(key, signature[key].default))
    pair[place[2]] = value
    values[key] = tuple(pair)


def _check_number(name: str, key: str, value: Any) -> None:
    """A word in the place of a number: torch's own error would not say which one."""
    if isinstance(value, (str, bool)):
        raise ConfigError(f"{name}: {key} must be a real number, got {value!r}")


def _plain(key: str, value: Any) -> Any:
    """A value of a TOML file as Python has it: a dtype for its name, tuples, integer keys."""
    if key.endswith("dtype") and key not in ("root_dtype", "storage_dtype", "q_dtype"):
        dtype = getattr(torch, value, None) if isinstance(value, str) else value
        if value is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError(f"{key} must be the name of a torch dtype, got {value!r}")
        return dtype
    if isinstance(value, list):
        return tuple(value)
    if key == "structure" and isinstance(value, Mapping):
        return {int(axes): _plain(key, entry) for axes, entry in value.items()}
    return value
