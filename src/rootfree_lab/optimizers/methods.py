"""The optimizers that have a name here: how each is built, and where it keeps the common words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import rootfree
from rootfree_lab import baselines
from rootfree_lab.optimizers import peers

# A word's place among a method's own options: a name, an element of one, or one minus that.
Words = Mapping[str, str]

_ADAM = {"momentum": "betas[0]", "precond_lr": "1 - betas[1]", "damping": "eps"}
_SOAP = {**_ADAM, "update_every": "precondition_frequency"}
_SIRF = {
    "precond_lr": "beta2",
    "momentum": "alpha1",
    "riemannian_momentum": "alpha2",
    "damping": "lam",
    "weight_decay": "kappa",
    "update_every": "T",
    "factor_dtype": "preconditioner_dtypes",
}
_PEERS: tuple[tuple[str, str, Words], ...] = (
    ("pytorch_optimizer", "SOAP", _SOAP),
    ("pytorch_optimizer", "Kron", {}),
    ("pytorch_optimizer", "ScalableShampoo", {}),
    ("heavyball", "SOAP", _SOAP),
    ("heavyball", "PSGDKron", {}),
)


@dataclass(frozen=True)
class Method:
    """How one name of the registry is built."""

    load: Callable[[], Any]  # imports, where it has to, and returns the constructor
    words: Words = field(default_factory=dict)
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
            words={"precond_lr": "1 - alpha", "damping": "eps"},
        ),
        "AdamW": Method(_given(torch.optim.AdamW), words=_ADAM),
        "Adagrad": Method(_given(torch.optim.Adagrad), words={"damping": "eps"}),
        "Muon": Method(lambda: torch.optim.Muon, is_matrix=True, two_axes=True, companion="AdamW"),
        "Shampoo": Method(_given(baselines.Shampoo), is_matrix=True),
        "FullAdagrad": Method(_given(baselines.FullAdagrad), is_matrix=True),
    }
    diagonal = (rootfree.RFRMSprop, rootfree.RFAdagrad, rootfree.RFAdamW)
    full = (rootfree.RFFullAdagrad, rootfree.IFFullAdagrad)
    matrix = (*full, rootfree.RFShampoo, rootfree.IFShampoo, rootfree.IFWhitening)
    adam = {word: _ADAM[word] for word in ("momentum", "precond_lr")}
    for ours in (*diagonal, *matrix):
        own = adam if ours is rootfree.RFAdamW else {}
        method = partial(Method, words=own, is_matrix=ours in matrix, is_ours=True)
        methods[ours.__name__] = method(_given(ours))
        if "batch_size" in ours.options:
            methods[f"{ours.__name__}-no-B"] = method(partial(baselines.without_batch_size, ours))
        if ours in diagonal or ours is rootfree.RFFullAdagrad:
            methods[f"{ours.__name__}-zero-init"] = method(
                partial(baselines.zero_initialised, ours)
            )
    methods["sirfshampoo"] = Method(
        peers.sirfshampoo, words=_SIRF, is_matrix=True, package="sirfshampoo"
    )
    for package, name, words in _PEERS:
        load = partial(peers.load, package, name)
        methods[f"{package}.{name}"] = Method(load, words=words, is_matrix=True, package=package)
    return methods


METHODS = _methods()
