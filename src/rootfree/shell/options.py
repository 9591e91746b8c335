"""The hyper-parameters of the methods: one word, one meaning, one check for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rootfree.layout.structured import structure_option, symmetric_structure_option
from rootfree.shell.checks import (
    Check,
    OneOf,
    Optional,
    Real,
    boolean,
    init_scale,
    learning_rate,
    positive,
    positive_integer,
)
from rootfree.shell.schedules import refresh_interval

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer

#: Options of every method; a class may narrow a range.
BASIC_OPTIONS: dict[str, Check] = {
    "lr": learning_rate,
    "batch_size": Optional(positive_integer),
    "damping": Real(),
    "weight_decay": Real(),
    "state_dtype": Optional(OneOf((torch.float32, torch.float64, torch.bfloat16))),
    "maximize": boolean,
}

#: Options of the methods with heavy-ball momentum.
HEAVY_BALL_OPTIONS: dict[str, Check] = {
    **BASIC_OPTIONS,
    "precond_lr": Real(high=1.0),
    "momentum": Real(high=1.0, open_high=True),
    "nesterov": boolean,
    "decoupled_weight_decay": boolean,
    "max_update": Optional(positive),
}

#: Options of the methods that may have another start.
START_OPTIONS: dict[str, Check] = {"fast_start": boolean}

#: Options of the methods that work on blocks.
BLOCK_OPTIONS: dict[str, Check] = {
    **HEAVY_BALL_OPTIONS,
    "gamma": Real(high=1.0),
    "update_every": refresh_interval,
    "block_size": Optional(positive_integer),
    "update_rms": Optional(positive),
    "max_update_rms": Optional(positive),
}

#: Options of the inverse-free methods among them.
INVERSE_FREE_OPTIONS: dict[str, Check] = {
    **BLOCK_OPTIONS,
    # I - β₂m/‖m‖ must stay invertible.
    "precond_lr": Real(high=1.0, open_high=True),
    "riemannian_momentum": Real(high=1.0, open_high=True),
    "structure": structure_option,
    "factor_norm": OneOf((None, "frobenius", "spectral")),
    "init_scale": init_scale,
    "factor_dtype": Optional(OneOf((torch.float32, torch.float64, torch.bfloat16))),
    "matmul_dtype": Optional(OneOf((torch.float32, torch.float64, torch.bfloat16, torch.float16))),
}

_NO_SCALE = {"batch_size", "gamma", "riemannian_momentum", "init_scale", "decoupled_weight_decay"}

#: Options of inverse-free whitening: the direction has no scale, so there is no B.
WHITENING_OPTIONS: dict[str, Check] = {
    **START_OPTIONS,
    **{name: INVERSE_FREE_OPTIONS[name] for name in INVERSE_FREE_OPTIONS if name not in _NO_SCALE},
    "precond_lr": Real(high=1.0),
    "structure": symmetric_structure_option,
    "matmul_dtype": Optional(OneOf((torch.float32, torch.float64, torch.bfloat16))),
}

#: Options that some method has, or AdamW.
OF_SOME_METHOD = {
    *INVERSE_FREE_OPTIONS,
    *START_OPTIONS,
    *("betas", "eps", "form", "safeguard", "rate_by_rank"),
}


def check_switches(given: Mapping[str, Any]) -> None:
    """Refuse values of torch's switches that no method here supports."""
    fused, foreach, differentiable = (given[k] for k in ("fused", "foreach", "differentiable"))
    if foreach not in (None, True):
        raise ValueError(
            f"foreach must be None or True, got {foreach!r}: parameters are always updated many at "
            "a time, and nothing but the memory for that depends on it"
        )
    if foreach and fused:
        raise ValueError("foreach and fused must not both be True: they are two ways to do a step")
    if differentiable is not False:
        raise ValueError(
            f"differentiable must be False, got {differentiable!r}: a step changes parameters and "
            "state in place, without a graph"
        )


# Schedules may set these to any number, as in torch: a negative one only reverses a step.
_FREE = ("lr", "weight_decay")


def checked_values(optimizer: RootFreeOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, checked: users and schedulers may set them at any time."""
    method = optimizer._of(group)
    if ("damping" if method is optimizer else "betas") not in group:
        raise ValueError(
            "companion must stay what it was when the group was added, got "
            f"{group.get('companion')!r}: the group lacks the options of "
            f"{type(method).__name__}. Make a new optimizer"
        )
    values = {name: group[name] for name in method.options if name in group and name not in _FREE}
    if len(values) + len(_FREE) == len(method.options):  # else it was pickled by an older version
        # Which blocks the parameters are cut into is asked when these, or their form, change.
        method._checked_options({**values, **dict.fromkeys(_FREE, 0.0), "params": []})
    return values
