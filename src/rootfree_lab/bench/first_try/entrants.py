"""The optimizers of the first try: by name, with their defaults or with options from `--set`."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer

import rootfree
from rootfree_lab import optimizers
from rootfree_lab.config.reading import ConfigError, check_names, parse_assignment, plain_options
from rootfree_lab.config.settings import OptimizerConfig
from rootfree_lab.optimizers.methods import METHODS
from rootfree_lab.optimizers.words import translated

#: of AdamW beside optimizers of other packages
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
_REGISTERED = {"SOAP": "pytorch_optimizer.SOAP"}
#: AdamW takes what is no hidden matrix, with a step size of its own.
_COMPANIONS = {"Muon": "AdamW", "SOAP": "AdamW", **dict.fromkeys(MATRIX, "parameter_groups")}
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

    @property
    def optimizer(self) -> OptimizerConfig:
        """As the laboratory builds it."""
        options = {**_GIVEN.get(self.name, {}), **self.given}
        if self.name in _COMPANIONS:
            given = {key: options.pop(key) for key in [*options] if key.startswith("companion_")}
            own = {"lr": _of_groups()["lr"] if self.name in MATRIX else COMPANION_LR}
            options["companion_options"] = own | {k.split("_", 1)[1]: v for k, v in given.items()}
            options["companion"] = _COMPANIONS[self.name]
        return OptimizerConfig(_REGISTERED.get(self.name, self.name), options)

    def effective(self) -> dict[str, Any]:
        """All options as JSON has them, defaults included: a changed default is another run."""
        registered, options = self.optimizer.name, dict(self.optimizer.options)
        signature = inspect.signature(METHODS[registered].load()).parameters
        defaults = {
            key: parameter.default
            for key, parameter in signature.items()
            if key not in ("params", "batch_size")
        }
        options.pop("companion", None)
        companion = {f"companion_{k}": v for k, v in options.pop("companion_options", {}).items()}
        if self.name in MATRIX and not {"companion_momentum", "companion_precond_lr"} & {
            *companion
        }:
            companion["companion_betas"] = _of_groups()["betas"]
        values = {**defaults, **companion, **translated(registered, signature, options)}
        found: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return found


@cache
def _of_groups() -> dict[str, Any]:
    """The options that `rootfree.parameter_groups` gives AdamW."""
    (vectors,) = rootfree.parameter_groups(nn.LayerNorm(2))
    return vectors


def available(name: str) -> bool:
    """Whether the installed torch or package has it."""
    return optimizers.available(_REGISTERED.get(name, name))


def line_up(names: Sequence[str], assignments: Sequence[str]) -> list[Entrant]:
    """The entrants of these names (all of them if there are none), with the options of `--set`.

    `NAME.option=a,b` has two values: each gives an entrant, in all combinations with the others.
    """
    check_names("--optimizers: the optimizer", names, NAMES)
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
    """The optimizers that train the model: one, or two where a companion is one of its own."""
    made = entrant.optimizer
    optimizers.check(made.name, made.options)
    return optimizers.build(made.name, model, batch_size=batch_size, **made.options)


def _assigned(assignments: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The options of each optimizer, in all combinations of their values; checked."""
    values: dict[str, dict[str, list[Any]]] = {}
    for text in assignments:
        target, _, given = text.partition("=")
        name, dot, option = target.strip().partition(".")
        if not (dot and option and given.strip()):
            raise ConfigError(f"--set takes OPTIMIZER.OPTION=VALUE, got {text!r}")
        check_names("--set: the optimizer", [name], NAMES)
        several = [given] if given.lstrip()[:1] in "[{\"'" else given.split(",")
        parsed = [plain_options(dict([parse_assignment(f"{option}={v}")])) for v in several]
        values.setdefault(name, {})[option] = [each[option] for each in parsed]
    found = {
        name: [dict(zip(each, row, strict=True)) for row in itertools.product(*each.values())]
        for name, each in values.items()
    }
    for name, combinations in found.items():
        for options in combinations:  # a value out of range is an error before the first run
            build(Entrant(name, options), nn.Linear(2, 2), batch_size=1)
    return found


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
