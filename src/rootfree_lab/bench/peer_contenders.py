"""Shampoo and optimizers of other packages, at the settings that speed is compared at."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rootfree_lab import baselines
from rootfree_lab.bench import floors
from rootfree_lab.bench.contenders import (
    LR,
    B,
    Built,
    Contender,
    NotApplicableError,
    Parameters,
    one,
)
from rootfree_lab.optimizers import peers as packages


def peers() -> list[Contender]:
    """Each imports its package when it is built; without the package its row says so."""
    half = torch.bfloat16
    return [
        Contender(
            "Shampoo T=2",
            one(lambda ps: baselines.Shampoo(ps, lr=LR, update_every=2)),
            "peer",
            period=2,
            room=60.0,
        ),
        _sirfshampoo("sirfshampoo fp32 T=2", 2, torch.float32, room=68.0),
        _sirfshampoo("sirfshampoo bf16 T=2", 2, half, room=40.0),
        _sirfshampoo("sirfshampoo bf16 T=10", 10, half, room=40.0),
        Contender("SOAP T=10", one(_soap), "peer", period=10, room=52.0),
        Contender("Scalable Shampoo T=10", one(_scalable_shampoo), "peer", period=10, room=60.0),
        Contender(
            "Distributed Shampoo T=10", one(_distributed_shampoo), "peer", period=10, room=52.0
        ),
    ]


def _package(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise NotApplicableError(f"needs {error.name}: {install}") from error


def _sirfshampoo(name: str, T: int, dtype: torch.dtype, *, room: float) -> Contender:
    """The published inverse-free Shampoo, with diagonal factors for vectors.

    The package registers dense factors alone; a dense factor of a bias would cost more than the
    matrices do. Those of `singd` fit, and are what the package's authors use elsewhere.
    """

    def build(ps: Parameters) -> Built:
        install = "pip install sirfshampoo"
        published = _package("sirfshampoo", install).SIRFShampoo
        dense = _package("singd.structures.dense", install).DenseMatrix
        diagonal = _package("singd.structures.diagonal", install).DiagonalMatrix

        structures = {"dense": dense, "diagonal": diagonal}
        extended: Any = type("SIRFShampoo", (published,), {"SUPPORTED_STRUCTURES": structures})
        optimizer: Optimizer = extended(
            nn.ParameterList(ps),
            params=ps,
            lr=LR,
            batch_size=B,
            T=T,
            structures={1: "diagonal", **dict.fromkeys((2, 3, 4, 5), "dense")},
            preconditioner_dtypes=dtype,
        )
        return Built(ps, [optimizer], optimizer.step)

    def floor(built: Built) -> floors.Work | None:
        return floors.published_inverse_free(built, dtype)

    return Contender(name, build, "peer", period=T, floor=floor, room=room)


def _soap(ps: Parameters) -> Optimizer:
    try:
        soap: Any = packages.pytorch_optimizer("SOAP")
    except ModuleNotFoundError:
        _package("heavyball", "pip install pytorch_optimizer, or heavyball")
        soap = packages.heavyball("SOAP")
    return soap(ps, lr=LR, precondition_frequency=10)  # type: ignore[no-any-return]


def _scalable_shampoo(ps: Parameters) -> Optimizer:
    module = _package("pytorch_optimizer", "pip install pytorch_optimizer")
    return module.ScalableShampoo(  # type: ignore[no-any-return]
        ps, lr=LR, block_size=1024, start_preconditioning_step=1, preconditioning_compute_steps=10
    )


def _distributed_shampoo(ps: Parameters) -> Optimizer:
    module = _package(
        "distributed_shampoo", "it is not on PyPI, but in github.com/facebookresearch/optimizers"
    )
    return module.DistributedShampoo(  # type: ignore[no-any-return]
        ps, lr=LR, max_preconditioner_dim=8192, precondition_frequency=10
    )
