"""The methods as the paper states them, and how to start them at a given preconditioner.

A start is given by matrices Aₙ, one per axis (one in all for the diagonal and full-matrix methods):
S₀ = ⊗ AₙᵀAₙ, hence S₀⁻¹ = ⊗ KₙKₙᵀ with Kₙ = Aₙ⁻¹. It is what S₀ = I becomes in the coordinates q of
p = (⊗ Aₙ) q, and for Aₙ = c^{1/2N}·I it is S₀ = c·I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rootfree
from rootfree_lab.baselines.roots import apply_on_axes

Shape = tuple[int, ...]
State = dict[str, Tensor]

# Twelve elements as a vector, a matrix and a tensor of three axes.
VECTOR: Shape = (12,)
MATRIX: Shape = (3, 4)
TENSOR: Shape = (2, 3, 2)


@dataclass(frozen=True)
class Method:
    """A method, the shapes to try it on, and its state for a given preconditioner."""

    name: str
    short: str  # in the names of claims
    build: Callable[..., torch.optim.Optimizer]
    shapes: tuple[Shape, ...]
    kronecker: bool = False
    keeps_factors: bool = False  # Kₙ, not Sₙ

    def axes(self, shape: Shape) -> Shape:
        """The sizes of the matrices Aₙ."""
        return shape if self.kronecker else (torch.Size(shape).numel(),)

    def make(self, p: nn.Parameter, As: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
        """The optimizer of one parameter, started at S₀ = ⊗ AₙᵀAₙ; without As as it is."""
        optimizer = self.build([p], **options)
        state, start = optimizer.state[p], self._start(As)
        for key in state.keys() & start.keys():
            state[key].copy_(start[key])
        return optimizer

    def _start(self, As: Sequence[Tensor]) -> State:
        """S₀ under all names that one of the methods keeps it by."""
        state: State = {}
        for n, A in enumerate(As):
            S = A.mT @ A
            state[f"block0.factor{n}"] = torch.linalg.inv(A) if self.keeps_factors else S
            state[f"block0.inverse{n}"] = torch.linalg.inv(S)
            if not self.kronecker:
                state |= {"preconditioner": S.diagonal(), "block0.factor": S}
                state["block0.inverse"] = state["block0.inverse0"]
        return state


class Constant:
    """The same curvature at every step: one of the library's forms, or a matrix and the shape."""

    def __init__(self, H: Any, shape: Shape = ()) -> None:
        if isinstance(H, Tensor):
            values, vectors = torch.linalg.eigh(H)
            H = rootfree.SumOfOuterProducts((vectors * values.sqrt()).mT.reshape(-1, *shape))
        self._H = H

    def joint(self) -> Sequence[tuple[Tensor, Tensor]]:
        return ()

    def check(self, params: Sequence[Tensor]) -> None:
        return

    def of(self, p: Tensor, *, batch_size: int) -> Any:
        return self._H

    def used(self) -> None:
        return


def inverses(state: State) -> list[Tensor]:
    """Sₙ⁻¹ of every axis, from the state of a matrix method with one block."""
    kept = sorted(key for key in state if key.startswith("block0.inverse"))
    if kept:
        return [state[key][0] for key in kept]
    factors = sorted(key for key in state if key.startswith("block0.factor"))
    return [state[key][0] @ state[key][0].mT for key in factors]


def walk(optimizer: torch.optim.Optimizer, p: Tensor, gradients: Iterable[Tensor]) -> State:
    """Take a step with each of the gradients; the state of the parameter after them."""
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    state: State = optimizer.state[p]
    return state


def multiply_axes(As: Sequence[Tensor], q: Tensor) -> Tensor:
    """(⊗ Aₙ) q: Aₙ along axis n, or one matrix on all elements."""
    if len(As) == 1:
        return (As[0] @ q.flatten()).view(q.shape)
    return apply_on_axes(q, As)


_plain: dict[str, Any] = {"nesterov": False, "decoupled_weight_decay": False, "max_update": None}
_whole = {"block_size": None, "update_every": 1, "max_update_rms": None, **_plain}
_bare: dict[str, Any] = {"safeguard": False, "momentum": 0.0, "precond_lr": 0.1}
_paper: dict[str, Any] = {**_whole, "factor_norm": "frobenius", "init_scale": 1.0}


RF_RMSPROP = Method(
    "RF-RMSProp", "rf-rmsprop", partial(rootfree.RFRMSprop, fast_start=False, **_plain), (VECTOR,)
)
RF_ADAGRAD = Method("RF-AdaGrad", "rf-adagrad", partial(rootfree.RFAdagrad, **_plain), (VECTOR,))
RF_FULL = Method(
    "RF full matrix", "rf-full", partial(rootfree.RFFullAdagrad, **_whole, **_bare),
    (VECTOR, MATRIX),
)  # fmt: skip
IF_COVARIANCE = Method(
    "IF full matrix, covariance form", "if-covariance",
    partial(rootfree.IFFullAdagrad, form="covariance", **_paper, **_bare), (VECTOR, MATRIX),
)  # fmt: skip
IF_FACTOR = Method(
    "IF full matrix, factor form", "if-factor",
    partial(rootfree.IFFullAdagrad, form="factor", **_paper, **_bare), (VECTOR, MATRIX),
    keeps_factors=True,
)  # fmt: skip
RF_SHAMPOO = Method(
    "RF-Shampoo", "rf-shampoo",
    partial(rootfree.RFShampoo, rate_by_rank=False, factor_norm=None, init_scale=1.0, **_whole),
    (VECTOR, MATRIX, TENSOR), kronecker=True,
)  # fmt: skip
IF_SHAMPOO = Method(
    "IF-Shampoo", "if-shampoo",
    partial(rootfree.IFShampoo, structure="dense", rate_by_rank=False, **_paper),
    (VECTOR, MATRIX, TENSOR), kronecker=True, keeps_factors=True,
)  # fmt: skip
DIAGONAL = (RF_RMSPROP, RF_ADAGRAD)
MATRIX_METHODS = (RF_FULL, IF_COVARIANCE, IF_FACTOR, RF_SHAMPOO, IF_SHAMPOO)
