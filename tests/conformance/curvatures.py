"""Curvature made from gradients, one of each form: it needs no recorder and works anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rootfree import DiagonalCurvature, KroneckerCurvature, SumOfOuterProducts


class FromGradients:
    """H of a form that resembles B·ggᵀ."""

    def __init__(self, form: str) -> None:
        self.form = form

    def joint(self) -> Sequence[tuple[Tensor, Tensor]]:
        return ()

    def check(self, params: Sequence[Tensor]) -> None:
        assert all(p.grad is not None for p in params)

    def used(self) -> None:
        pass

    def of(self, p: Tensor, *, batch_size: int) -> Any:
        assert p.grad is not None
        g = p.grad.to(torch.promote_types(p.dtype, torch.float32))
        if self.form == "outer products":
            half = (batch_size / 2) ** 0.5 * g
            return SumOfOuterProducts(torch.stack([half, half]))
        if self.form == "diagonal":
            return DiagonalCurvature(batch_size * g.square())
        matrix = g.reshape(p.shape[0] if p.dim() > 0 else 1, -1)
        outputs, inputs = matrix @ matrix.mT, matrix.mT @ matrix
        size = matrix.square().sum().clamp(min=1e-30)
        return KroneckerCurvature((batch_size * outputs, inputs / size), tuple(matrix.shape))
