"""The optimizers of the first try: by name, with their defaults or with options from `--set`."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import rootfree
from rootfree_lab.config.reading import ConfigError, parse_assignment, plain_options, unknown_name
from rootfree_lab.optimizers.roles import NamedParameters, split_parameters, trainable

COMPANION_LR = 1e-3
REFERENCES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Muon": {},
}
DIAGONAL = ("RFRMSprop", "RFAdagrad", "RFAdamW")
MATRIX = ("RFShampoo", "IFShampoo", "IFWhitening")
FULL_MATRIX = ("RFFullAdagrad", "IFFullAdagrad")  # on convex tasks alone
#: From other packages; they run where they are asked for by name.
PEERS: dict[str, dict[str, Any]] = {"SOAP": {"lr": 3e-3, "precondition_frequency": 10}}
NAMES = (*REFERENCES, *DIAGONAL, *MATRIX, *FULL_MATRIX, *PEERS)
_GIVEN = {**REFERENCES, **PEERS}
#: Options beside the defaults that are tried unless `--set` gives others.
_VARIANTS: dict[str, list[dict[str, Any]]] = {name: [{}, {"gamma": 1.0}] for name in FULL_MATRIX}


@dataclass(frozen=True)
class Entrant:
    """An optimizer and the options that differ from its first try."""

    name: str
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name and the options: `IFShampoo lr=0.003`."""
        return " ".join([self.name, *(f"{key}={_word(v)}" for key, v in self.given.items())])

    @property
    def convex_only(self) -> bool:
        return self.name in FULL_MATRIX

    def effective(self) -> dict[str, Any]:
        """All options as JSON has them, defaults included: a changed default is another run."""
        defaults = {
            key: parameter.default
            for key, parameter in _signature(self.name).items()
            if key not in ("params", "batch_size")
        }
        companion = {"companion_lr": COMPANION_LR} if _has_companion(self.name) else {}
        values = {**defaults, **companion, **_GIVEN.get(self.name, {}), **self.given}
        options: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return options


def available(name: str) -> bool:
    """Whether the installed torch and library have it."""
    return hasattr(_home(name), name)


def line_up(names: Sequence[str], assignments: Sequence[str]) -> list[Entrant]:
    """The entrants of these names (all of them if there are none), with the options of `--set`.

    `NAME.option=a,b` has two values: each gives an entrant, in all combinations with the others.
    """
    for name in names:
        if name not in NAMES:
            raise unknown_name("--optimizers: the optimizer", name, NAMES)
    options = _assigned(assignments)
    if names and (unused := [name for name in options if name not in names]):
        raise ConfigError(f"--set has options of {unused[0]}, which --optimizers leaves out")
    chosen = [name for name in NAMES if (name in names if names else name not in PEERS)]
    return [
        Entrant(name, given)
        for name in chosen
        for given in options.get(name, _VARIANTS.get(name, [{}]))
    ]


def build(entrant: Entrant, model: nn.Module, *, batch_size: int) -> list[Optimizer]:
    """The optimizers that train the model: one, or two where a companion is one of its own.

    A matrix method takes the hidden matrices and AdamW the rest. The head counts as hidden where it
    is all that there is, as in a linear model.
    """
    options = {**_GIVEN.get(entrant.name, {}), **entrant.given}
    companion_lr = options.pop("companion_lr", COMPANION_LR)
    if "batch_size" in _signature(entrant.name):
        options["batch_size"] = batch_size
    kind = getattr(_home(entrant.name), entrant.name)
    try:
        if not _has_companion(entrant.name):
            return [kind(trainable(model), **options)]
        if entrant.name in MATRIX:
            groups = rootfree.parameter_groups(model, companion="adamw", companion_lr=companion_lr)
            return [kind(groups, **options)]
        matrices, rest = _split(model, two_axes=entrant.name == "Muon")
        optimizers = [kind(matrices, **options)] if matrices else []
        if rest:
            optimizers.append(torch.optim.AdamW(rest, lr=companion_lr))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{entrant.label}: {error}") from error
    return optimizers


def _split(model: nn.Module, *, two_axes: bool) -> tuple[NamedParameters, NamedParameters]:
    """What the method takes, and what its companion."""
    matrices, rest = split_parameters(model, two_axes=two_axes)
    if not matrices:
        matrices = [(key, p) for key, p in rest if p.dim() == 2]
        rest = [(key, p) for key, p in rest if p.dim() != 2]
    return matrices, rest


def _home(name: str) -> Any:
    if name in PEERS:
        try:
            return importlib.import_module("pytorch_optimizer")
        except ImportError:
            return None
    return torch.optim if name in REFERENCES else rootfree


def _signature(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(_home(name), name)).parameters


def _has_companion(name: str) -> bool:
    return name in ("Muon", *PEERS, *MATRIX)


def _assigned(assignments: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The options of each optimizer, in all combinations of their values; checked."""
    values: dict[str, dict[str, list[Any]]] = {}
    for text in assignments:
        target, _, given = text.partition("=")
        name, dot, option = target.strip().partition(".")
        if not (dot and option and given.strip()):
            raise ConfigError(f"--set takes OPTIMIZER.OPTION=VALUE, got {text!r}")
        _check(name, option)
        several = [given] if given.lstrip()[:1] in "[{\"'" else given.split(",")
        parsed = [plain_options(dict([parse_assignment(f"{option}={v}")])) for v in several]
        values.setdefault(name, {})[option] = [_value(option, p[option]) for p in parsed]
    found = {
        name: [dict(zip(each, row, strict=True)) for row in itertools.product(*each.values())]
        for name, each in values.items()
    }
    for name, combinations in found.items():
        for options in combinations:  # a value out of range is an error before the first run
            build(Entrant(name, options), nn.Linear(2, 2), batch_size=1)
    return found


def _check(name: str, option: str) -> None:
    if name not in NAMES:
        raise unknown_name("--set: the optimizer", name, NAMES)
    if not available(name):
        raise ConfigError(f"--set: {name} is not installed")
    allowed = [key for key in _signature(name) if key not in ("params", "batch_size")]
    allowed += ["companion_lr"] if _has_companion(name) else []
    if option not in allowed:
        raise unknown_name(f"--set: the option of {name},", option, allowed)


def _value(option: str, value: Any) -> Any:
    if not option.endswith("dtype") or value is None:
        return value
    dtype = getattr(torch, str(value), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--set: {option} must be the name of a torch dtype, got {value!r}")
    return dtype


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).removeprefix("torch.")
