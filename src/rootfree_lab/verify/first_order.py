"""Methods that agree to first order in β₂: their difference shrinks as β₂², a slope of two.

Both methods start at one S₀ that is not symmetric in its factors (K ≠ Kᵀ, so that KᵀK ≠ KKᵀ), see
the same gradients, and nothing bounds the step of the factors (factor_norm=None).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor, nn

from rootfree_lab.verify.claim import Measured, claim, largest, relative_difference
from rootfree_lab.verify.draws import mixing, normal
from rootfree_lab.verify.methods import (
    IF_COVARIANCE,
    IF_FACTOR,
    IF_SHAMPOO,
    MATRIX,
    RF_FULL,
    RF_SHAMPOO,
    VECTOR,
    Method,
    inverses,
    walk,
)

# Small enough for the leading term, large enough to stand clear of rounding: 1e-10·C against 1e-15.
BETAS = [10.0**-k for k in (3.0, 3.5, 4.0, 4.5, 5.0)]
TOLERANCE = 0.05  # β₂³ terms bend the slope by some hundredths; a first-order error makes it one

STEPS = 3
B, DAMPING = 7, 0.3


def preconditioner(
    method: Method, As: list[Tensor], gradients: list[Tensor], **options: Any
) -> list[Tensor]:
    """Sₙ⁻¹ of every axis after these gradients, from S₀ = ⊗ AₙᵀAₙ."""
    p = nn.Parameter(torch.zeros_like(gradients[0]))
    return inverses(walk(method.make(p, As, lr=0.0, batch_size=B, **options), p, gradients))


def same_to_first_order(generator: torch.Generator, *, method: Method, exact: Method) -> Measured:
    """The slope of ‖S⁻¹ - S⁻¹ of the exact method‖ over β₂."""

    def difference(
        As: list[Tensor], gradients: list[Tensor], gamma: float, lam: float, beta2: float
    ) -> float:
        options = {"precond_lr": beta2, "gamma": gamma, "damping": lam}
        found = preconditioner(method, As, gradients, **options, factor_norm=None)
        true = preconditioner(exact, As, gradients, **options)
        return largest(map(relative_difference, found, true))

    curves = []
    for shape, gamma, lam in product(method.shapes, (0.0, 1.0), (0.0, DAMPING)):
        As = [mixing(generator, d, d) for d in method.axes(shape)]
        gradients = [normal(generator, *shape) / 4 for _ in range(STEPS)]
        curves.append(partial(difference, As, gradients, gamma, lam))
    return slope_two(curves)


for _method, _exact in (
    (IF_COVARIANCE, RF_FULL), (IF_FACTOR, RF_FULL), (IF_SHAMPOO, RF_SHAMPOO),
):  # fmt: skip
    _sentence = f"{_method.name} is {_exact.name} to first order in β₂."
    claim(f"first-order-{_method.short}", _sentence, method=_method, exact=_exact)(
        same_to_first_order
    )


@claim("truncation", "K(I - β₂m) is K·exp(-β₂m) to first order in β₂.")
def truncation(generator: torch.Generator) -> Measured:
    """K(I - β₂h), what the library does, against K·exp(-β₂h), with one axis and with two."""

    def difference(method: Method, As: list[Tensor], G: Tensor, beta2: float) -> float:
        options = {"precond_lr": beta2, "gamma": 1.0, "damping": DAMPING, "factor_norm": None}
        found = preconditioner(method, As, [G], **options)
        Ks = [torch.linalg.inv(A) for A in As]
        hs = tangents(Ks, G)
        moved = [K @ torch.matrix_exp(-beta2 * h) for K, h in zip(Ks, hs, strict=True)]
        return largest(map(relative_difference, found, [K @ K.mT for K in moved]))

    curves = []
    for method, shape in ((IF_FACTOR, VECTOR), (IF_SHAMPOO, VECTOR), (IF_SHAMPOO, MATRIX)):
        As = [mixing(generator, d, d) for d in method.axes(shape)]
        curves.append(partial(difference, method, As, normal(generator, *shape) / 4))
    return slope_two(curves)


def tangents(Ks: list[Tensor], G: Tensor) -> list[Tensor]:
    """hₙ of method 7 for one axis or two, γ = 1, written out with matrices."""
    C, K = Ks if len(Ks) == 2 else (Ks[0], torch.ones(1, 1, dtype=G.dtype))
    G = G if len(Ks) == 2 else G[:, None]
    p, d = G.shape
    X = C.mT @ G @ K
    I_p, I_d = torch.eye(p, dtype=G.dtype), torch.eye(d, dtype=G.dtype)
    h_C = (B / d * X @ X.mT + DAMPING * (K.mT @ K).trace() / d * C.mT @ C - I_p) / 2
    h_K = (B / p * X.mT @ X + DAMPING * (C.mT @ C).trace() / p * K.mT @ K - I_d) / 2
    return [h_C, h_K][: len(Ks)]


def slope_two(curves: Sequence[Callable[[float], float]]) -> Measured:
    """Fit every curve over β₂ and report the slope that is furthest from two."""
    fits = []
    for curve in curves:
        values = [curve(beta2) for beta2 in BETAS]
        # No difference at all would have no slope; and is not what happens.
        logs = [math.log(max(value, 1e-300)) for value in values]
        slope = linear_regression([math.log(beta2) for beta2 in BETAS], logs).slope
        fits.append((abs(slope - 2), slope, values))
    _, slope, values = max(fits)
    return Measured(
        slope,
        f"2 ± {TOLERANCE:g}",
        abs(slope - 2) < TOLERANCE,
        f"difference {values[0]:.1e} at β₂ = {BETAS[0]:g}, {values[-1]:.1e} at {BETAS[-1]:g}",
    )
