"""Curvature made up for tests: as the library takes it, and as a dense matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracles.curvature import diagonal, kronecker, sum_of_outer_products
from rootfree import DiagonalCurvature, KroneckerCurvature, SumOfOuterProducts

Array = np.ndarray


class Given:
    """A `rootfree.Curvature` that answers what it was told, and counts the questions."""

    def __init__(self, joint: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.answers: Mapping[Tensor, Any] = {}
        self.pairs = joint
        self.calls: list[str] = []
        self.batch_sizes: list[int] = []

    def joint(self) -> Sequence[tuple[Tensor, Tensor]]:
        return self.pairs

    def check(self, params: Sequence[Tensor]) -> None:
        self.calls.append("check")

    def of(self, p: Tensor, *, batch_size: int) -> Any:
        self.calls.append("of")
        self.batch_sizes.append(batch_size)
        return self.answers.get(p)

    def used(self) -> None:
        self.calls.append("used")


def _psd(rng: np.random.Generator, d: int, scale: float) -> Array:
    root = rng.normal(size=(d, d)) * (scale / d**0.5)
    return root @ root.T


def draw(kind: str, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 1.0) -> Any:
    """A random curvature of a parameter of this shape; entries of H are about scale²."""
    numel = int(np.prod(shape))
    if kind == "outer":
        return SumOfOuterProducts(torch.tensor(scale / 3**0.5 * rng.normal(size=(3, *shape))))
    if kind == "diagonal":
        return DiagonalCurvature(torch.tensor(np.asarray(scale**2 * rng.normal(size=shape))))
    first = shape[0] if shape else 1
    axes = {
        "kronecker": shape or (1,),
        "kronecker-merged": (first, numel // first),
        "kronecker-flat": (numel,),
        "kronecker-crossing": tuple(reversed(shape)) or (1,),
        "kronecker-diagonals": shape or (1,),
        "kronecker-mixed": shape or (1,),
    }[kind]
    each = scale ** (1 / len(axes))
    factors = [_psd(rng, d, each) for d in axes]
    diagonals = {"kronecker-diagonals": len(axes), "kronecker-mixed": 1}.get(kind, 0)
    for m in range(diagonals):
        factors[m] = each**2 * rng.uniform(0.1, 2.0, size=axes[m])
    return KroneckerCurvature(tuple(torch.tensor(f) for f in factors), axes)


KINDS = (
    "outer",
    "diagonal",
    "kronecker",
    "kronecker-merged",
    "kronecker-flat",
    "kronecker-crossing",
    "kronecker-diagonals",
    "kronecker-mixed",
)


def dense(H: Any) -> Array:
    """H as a D x D matrix in numpy, by the definitions; a diagonal with |h|."""
    if isinstance(H, SumOfOuterProducts):
        return sum_of_outer_products(H.V.numpy())
    if isinstance(H, DiagonalCurvature):
        return diagonal(np.abs(H.h.numpy()))
    assert isinstance(H, KroneckerCurvature)
    return kronecker([np.diag(U.numpy()) if U.dim() == 1 else U.numpy() for U in H.factors])
