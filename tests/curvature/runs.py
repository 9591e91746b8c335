"""Optimizers with given curvature beside their oracles, which get the same H as a dense matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import rootfree
from curvature.given import Given, dense, draw
from oracles.diagonal import RFAdaGradOracle, RFAdamWOracle, RFRMSPropOracle
from rules.matrix_runs import METHODS, Options

Array = np.ndarray


def _adamw(start: Array, options: Options) -> RFAdamWOracle:
    b1, b2 = options["betas"]
    words = {k: v for k, v in options.items() if k != "betas"}
    return RFAdamWOracle(start, momentum=b1, precond_lr=1 - b2, **words)


#: name -> (optimizer, oracle)
ALL_METHODS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **METHODS,
    "RFRMSprop": (
        partial(rootfree.RFRMSprop, max_update=None, nesterov=False, fast_start=False),
        lambda start, options: RFRMSPropOracle(start, **options),
    ),
    "RFAdagrad": (
        partial(rootfree.RFAdagrad, max_update=None),
        lambda start, options: RFAdaGradOracle(start, **options),
    ),
    "RFAdamW": (
        partial(rootfree.RFAdamW, max_update=None, nesterov=False, fast_start=False),
        _adamw,
    ),
}

_DIAGONAL: Options = {"lr": 0.05, "batch_size": 10, "damping": 0.3, "weight_decay": 0.1}
_MATRIX: Options = {
    **_DIAGONAL,
    "precond_lr": 0.1,
    "momentum": 0.8,
    "gamma": 0.5,
    "update_every": 1,
    "update_rms": None,
    "max_update_rms": None,
}
_FACTORS: Options = {"riemannian_momentum": 0.5, "factor_norm": "frobenius", "init_scale": 0.8}
_FULL: Options = {**_MATRIX, "nesterov": False}

#: settings in which no term of the update vanishes
BALANCED: dict[str, Options] = {
    "RFRMSprop": {**_DIAGONAL, "precond_lr": 0.1, "momentum": 0.8},
    "RFAdagrad": {**_DIAGONAL, "precond_lr": 0.1, "momentum": 0.8},
    "RFAdamW": {**_DIAGONAL, "betas": (0.8, 0.9)},
    "RFFullAdagrad": _FULL,
    "IFFullAdagrad-covariance": {**_FULL, "factor_norm": "frobenius"},
    "IFFullAdagrad-factor": {**_FULL, **_FACTORS},
    "RFShampoo": _MATRIX,
    "IFShampoo": {**_MATRIX, **_FACTORS, "structure": "dense"},
}


class PieceOfSizeOneError(Exception):
    """A block has an axis of size one beside others: the oracles squeeze it, the library not."""


def block_indices(optimizer: Any, p: torch.Tensor) -> Iterator[Array]:
    """Flat places of every block's elements, shaped like the block, whatever way p was cut."""
    if not hasattr(optimizer, "_cut"):
        yield np.arange(p.numel()).reshape(p.shape)
        return
    for _, tile, _ in optimizer._cut(p, optimizer.param_groups[0]):
        places = np.arange(int(np.prod(tile.view))).reshape(tile.view)
        for count in np.ndindex(*tile.counts):
            corner = [s + c * d for s, c, d in zip(tile.starts, count, tile.sizes, strict=True)]
            box = tuple(slice(c, c + d) for c, d in zip(corner, tile.sizes, strict=True))
            yield places[box]


def difference(
    method: str,
    kind: str,
    options: Options,
    *,
    shape: tuple[int, ...] = (3, 4),
    steps: int = 6,
    seed: int = 0,
    scale: float = 1.0,
    skew: float = 1.0,
) -> float:
    """Largest relative difference of the parameter over all steps.

    Every block has its own oracle, with the restriction of H to it; `skew` multiplies its H.
    """
    make, make_oracle = ALL_METHODS[method]
    rng = np.random.default_rng(seed)
    start = np.asarray(rng.normal(size=shape))
    p = nn.Parameter(torch.tensor(start))
    given = Given()
    optimizer = make([p], curvature=given, **options)
    blocks = list(block_indices(optimizer, p))
    if any(1 in i.shape and i.ndim > 1 for i in blocks) and 1 not in shape:
        raise PieceOfSizeOneError
    words = {k: v for k, v in options.items() if k != "block_size"}
    oracles = [make_oracle(start.reshape(-1)[i], words) for i in blocks]
    worst = 0.0
    for _ in range(steps):
        g = np.asarray(0.5 * rng.normal(size=shape))
        H = draw(kind, shape, rng, scale)
        p.grad, given.answers = torch.tensor(g), {p: H}
        optimizer.step()
        matrix, expected = skew * dense(H), np.zeros(p.numel())
        for i, oracle in zip(blocks, oracles, strict=True):
            flat = i.reshape(-1)
            h = matrix[np.ix_(flat, flat)]
            expected[flat] = np.asarray(oracle.step(g.reshape(-1)[i], h)).reshape(-1)
        off = np.linalg.norm(p.detach().numpy().reshape(-1) - expected) / np.linalg.norm(expected)
        assert np.isfinite(off)
        worst = max(worst, float(off))
    return worst
