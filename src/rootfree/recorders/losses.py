"""Losses whose Hessian by the model's outputs is known: its root, samples, and its scale.

`LossScale` tells whether a loss is the average that `batch_size` says.

z are the model's outputs as the loss takes them, one term ℓ for each row or element of z; the loss
that is differentiated is w Σ ℓ, with w = 1/B for an average and 1 for a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rootfree.recorders.ranks import GradientRanks

# Backward passes for one exact Hessian; beyond, it is refused.
_MOST_PASSES = 4096
# Gradients in half precision are off by under one part in a hundred.
_TOLERANCE = 1.05


class Loss(Protocol):
    """What the recorders ask of a loss."""

    def terms(self, z: Tensor) -> tuple[int, int]:
        """How many terms the loss averages, in the two ways in which they may be counted."""

    def roots(self, z: Tensor) -> Iterator[Tensor]:
        """Tensors s shaped like z with Σ s sᵀ = ∇²ℓ, for every example (row of z) at once."""

    def sample(self, z: Tensor, generator: torch.Generator) -> Tensor:
        """∇ℓ by z for targets drawn from the model's distribution: its covariance is ∇²ℓ."""

    def weight(self, z: Tensor, g: Tensor, loss: Tensor) -> Tensor:
        """A lower bound on w, given the loss w Σ ℓ and its gradient g by z."""


class CrossEntropy:
    """F.cross_entropy(z, ·), classes on axis 1 (0 without a batch): ∇²ℓ = diag(p) - ppᵀ."""

    def terms(self, z: Tensor) -> tuple[int, int]:
        rows = z.numel() // z.shape[_class_axis(z)]
        return rows, rows

    def roots(self, z: Tensor) -> Iterator[Tensor]:
        axis = _class_axis(z)
        p = z.softmax(axis)
        for c in range(z.shape[axis]):
            root = p.select(axis, c).sqrt()
            s = -p * root.unsqueeze(axis)  # √p_c (e_c - p)
            s.select(axis, c).add_(root)
            yield from _each_position(s, axis)

    def sample(self, z: Tensor, generator: torch.Generator) -> Tensor:
        axis = _class_axis(z)
        p = z.softmax(axis).movedim(axis, -1).contiguous()
        rows = _drawable(p.reshape(-1, p.shape[-1]))
        drawn = torch.multinomial(rows, 1, generator=generator)
        g = p.clone()  # p - e_y
        g.view(-1, p.shape[-1]).scatter_add_(1, drawn, -torch.ones_like(drawn, dtype=p.dtype))
        return g.movedim(-1, axis)

    def weight(self, z: Tensor, g: Tensor, loss: Tensor) -> Tensor:
        # g = w(p - y) with y >= 0, so w >= g/p; entries of tiny p would only add noise.
        p = z.softmax(_class_axis(z))
        return torch.where(p > 0.5 / z.shape[_class_axis(z)], g / p, 0.0).amax()


class ElementwiseLoss(Loss, Protocol):
    """One term ℓ for each element of z; a loss may also count the rows of z as its terms."""

    def hessian(self, z: Tensor) -> Tensor:
        """∇²ℓ of each element."""

    def terms(self, z: Tensor) -> tuple[int, int]:
        return z.numel(), z.numel() // z.shape[-1] if z.dim() > 1 else z.numel()

    def roots(self, z: Tensor) -> Iterator[Tensor]:
        for s in _each_position(self.hessian(z).sqrt().unsqueeze(-1), -1):
            yield s.squeeze(-1)


class SquaredError(ElementwiseLoss):
    """F.mse_loss(z, ·): ℓ = (z - y)² of each element, ∇²ℓ = 2."""

    def hessian(self, z: Tensor) -> Tensor:
        return torch.full_like(z, 2.0)

    def sample(self, z: Tensor, generator: torch.Generator) -> Tensor:
        return math.sqrt(2) * torch.empty_like(z).normal_(generator=generator)

    def weight(self, z: Tensor, g: Tensor, loss: Tensor) -> Tensor:
        # loss = w Σ (z-y)² and g = 2w(z-y); with other terms in the loss this is a lower bound.
        return g.square().sum() / (4 * loss)


class BinaryCrossEntropy(ElementwiseLoss):
    """F.binary_cross_entropy_with_logits(z, ·): for each element, ∇²ℓ = p(1 - p)."""

    def hessian(self, z: Tensor) -> Tensor:
        p = z.sigmoid()
        return p * (1 - p)

    def sample(self, z: Tensor, generator: torch.Generator) -> Tensor:
        p = z.sigmoid()
        return p - torch.bernoulli(_drawable(p), generator=generator)

    def weight(self, z: Tensor, g: Tensor, loss: Tensor) -> Tensor:
        # g = w(p - y) with 0 <= y <= 1: w >= g/p where g > 0, and w >= -g/(1-p) elsewhere.
        p = z.sigmoid()
        return (g.abs() / torch.where(g > 0, p, 1 - p).clamp(min=0.1)).amax()


LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "mse": SquaredError(),
    "binary_cross_entropy": BinaryCrossEntropy(),
}


class LossScale:
    """What was seen of a loss since the context was entered."""

    _terms: list[int]  # in both ways of counting them
    _weight: Tensor | None  # lower bound on the weight of a term in the loss
    _seen: bool  # whether any rank has seen the loss

    def __init__(self, ranks: GradientRanks) -> None:
        self._ranks = ranks
        self._trusted: set[int] = set()  # batch sizes whose scale was found right
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._terms, self._weight, self._seen = [0, 0], None, False

    def see(
        self,
        kind: Loss,
        z: Tensor,
        gradients: Sequence[Tensor],
        loss: Tensor,
        scale: Tensor | float,
    ) -> None:
        """Take the loss of outputs z and its gradients by them, both multiplied by `scale`."""
        self._seen = True
        self._terms = [a + b for a, b in zip(self._terms, kind.terms(z), strict=True)]
        for g in gradients if z.numel() > 0 else ():  # a rank may have no examples
            w = kind.weight(z.float(), g.float() / scale, loss / scale)
            self._weight = w if self._weight is None else torch.maximum(self._weight, w)

    def reduce(self) -> None:
        """Add up what the ranks saw."""
        *self._terms, seen = self._ranks.sums([*self._terms, int(self._seen)])
        self._seen = seen > 0

    def check(self, batch_size: int) -> None:
        """Raise RuntimeError where the loss contradicts `batch_size`; all ranks must ask."""
        if not self._seen:
            return
        terms = self._terms
        if batch_size not in (*terms, 1):
            raise RuntimeError(
                f"the loss had {' or '.join(map(str, dict.fromkeys(terms)))} terms, but "
                f"batch_size is {batch_size}. batch_size is the number of terms that the loss "
                "averages, over all micro-batches and ranks, or 1 for a summed loss"
            )
        if batch_size in self._trusted:
            return  # looked at once: reading the scale waits for the device
        here = 0.0 if self._weight is None else float(self._weight)
        here = here if math.isfinite(here) else math.inf  # which ranks see alike, unlike NaN
        # gradients of a rank are those of its own average
        excess = self._ranks.largest(here) * batch_size / self._ranks.divisor
        if excess == math.inf:
            return  # nothing to go by: another time
        if excess > _TOLERANCE:
            raise RuntimeError(
                f"batch_size={batch_size} says that the loss is an average, but its gradient is "
                f"at least {excess:.3g} times that of one: average the loss over its "
                f"{terms[0]} terms, or set batch_size=1 for a summed loss"
            )
        self._trusted.add(batch_size)


def check_exact(loss: str, z: Tensor, *, examples: int | None) -> None:
    """Refuse outputs whose terms cannot be taken one by one; None: the examples are not known."""
    if examples is not None and z.dim() > 0 and len(z) != examples:
        raise ValueError(
            f"outputs must have one row for each of the {examples} examples, got shape "
            f"{tuple(z.shape)}: terms of one example would be mixed. Give outputs as the loss "
            'takes them, (examples, classes, positions), or take fisher="monte-carlo"'
        )
    terms = z[0].numel() if z.dim() > 1 and len(z) else z.shape[0] if loss == "cross_entropy" else 1
    if terms > _MOST_PASSES:
        raise ValueError(
            f"outputs of shape {tuple(z.shape)} have {terms} terms an example, and the exact "
            f"Hessian takes a backward pass for each; at most {_MOST_PASSES} are made. Take "
            'fisher="monte-carlo"'
        )


def _drawable(p: Tensor) -> Tensor:
    """Probabilities without NaN, from which torch cannot draw; the gradient keeps it."""
    return p.nan_to_num(nan=1.0)


def _class_axis(z: Tensor) -> int:
    return 1 if z.dim() > 1 else 0


def _each_position(s: Tensor, axis: int) -> Iterator[Tensor]:
    """`s` at one position at a time: positions are all axes but the first and that of the classes.

    Positions of one example may have passed through the same rows of a layer: together they would
    add products of different terms.
    """
    if s.dim() < 3:
        yield s
        return
    rows = s.movedim(axis, -1)
    flat = rows.flatten(1, -2)
    for t in range(flat.shape[1]):
        alone = torch.zeros_like(flat)
        alone[:, t] = flat[:, t]
        yield alone.view(rows.shape).movedim(-1, axis)
