"""Sums of outer products: given for a parameter, and on a stack of blocks.

The default curvature B·ggᵀ is one of them: the stack of gradients itself, weighted by B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rootfree.structures import Structure, matricise, multiply_axis, per_block
from rootfree.structures.base import (
    divided,
    in_float16,
    power_of_two,
    sum_of_squares,
    wide_dtype,
)

# Curvature beyond this is as good as infinite: the factor's step is normalised. Without the limit
# the squared norm of a tangent vector could leave the range of fp32.
LARGEST = 1e15


@dataclass(frozen=True)
class SumOfOuterProducts:
    """A sum of outer products: per-example gradients (the standard empirical Fisher), or samples.

    Args:
        V: (r, *shape of the parameter), H = Σᵢ vec(Vᵢ)vec(Vᵢ)ᵀ. Any scaling is inside V: for a loss
            that averages B terms with gradients gᵢ the empirical Fisher has Vᵢ = gᵢ/√B.

    Example:
        >>> import torch, rootfree
        >>> g = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [3.0, 4.0]])  # of four terms
        >>> rootfree.SumOfOuterProducts(g / 4**0.5).diagonal()
        tensor([ 5., 10.])
    """

    V: Tensor

    def __post_init__(self) -> None:
        if self.V.dim() == 0:
            raise ValueError("V must have a leading axis that counts the outer products")

    def diagonal(self) -> Tensor:
        """The diagonal of H, shaped like the parameter."""
        return sum_of_squares(self.V, dim=0)


@dataclass(frozen=True)
class OuterProducts:
    """weight·Σᵢ vec(Vᵢ)vec(Vᵢ)ᵀ for a stack of blocks V (b, d_1..d_N) or, of several, (…, r).

    `scale` (b,) multiplies V. The default curvature is `OuterProducts(G, weight=B)`; `given` tells
    one that knows more than a single gradient from it.
    """

    V: Tensor
    weight: int = 1
    scale: Tensor | float = 1.0
    given: bool = False

    def in_frame(
        self, Ks: Sequence[Tensor], structures: Sequence[Structure]
    ) -> list[tuple[Tensor, Tensor]]:
        """For every axis n: Π(Σᵢ V̂ᵢ₍ₙ₎V̂ᵢ₍ₙ₎ᵀ) and its weight; V̂ᵢ is Vᵢ with Kⱼᵀ on each axis j.

        V̂ is scaled to entries of at most one, so that no product overflows or vanishes in half
        precision; the weight makes up for it.
        """
        V, sizes = self.V, [structure.d for structure in structures]
        # Roots are multiplied before they are squared: squares of small gradients would underflow.
        root = math.sqrt(self.weight) * self.scale
        if self.given:  # gradients were limited, so that their products with factors are in range
            unit = _unit(V)
            V, root = divided(V, unit.to(V.dtype)), unit * root
        for n, (K, structure) in enumerate(zip(Ks, structures, strict=True)):
            V = multiply_axis(V, n, partial(structure.apply_transposed, K))
        unit = _unit(V)
        columns = math.prod(V.shape[1:]) / min(sizes)
        if V.dtype == torch.float16 and columns > 2**15:  # a sum of so many ones would overflow
            unit = unit * 2.0 ** math.ceil(math.log2(columns / 2**15) / 2)
        V = V / per_block(unit.to(V.dtype), V)
        weight = (unit * root).square().clamp(max=LARGEST)
        return [
            (structure.project_gram(matricise(V, n)), weight / (math.prod(sizes) / sizes[n]))
            for n, structure in enumerate(structures)
        ]

    def contracted(self, inverses: Sequence[Tensor]) -> list[Tensor]:
        """For every axis n: weight/D₋ₙ·Σᵢ Vᵢ₍ₙ₎[⊗_{j≠n} Sⱼ⁻¹]Vᵢ₍ₙ₎ᵀ, dense (b, d_n, d_n)."""
        V, sizes = self.vectors(), [S_inv.shape[-1] for S_inv in inverses]
        terms = []
        for n in range(len(sizes)):
            X = V
            for j, S_inv in enumerate(inverses):
                if j != n:
                    X = multiply_axis(X, j, partial(torch.matmul, S_inv))
            gram = matricise(V, n) @ matricise(X, n).mT
            terms.append(gram * (self.weight * sizes[n] / math.prod(sizes)))
        return terms

    def dense(self) -> Tensor:
        V = self.vectors()
        if V.dim() == 2:
            return self.weight * V.unsqueeze(2) * V.unsqueeze(1)
        return V @ V.mT if self.weight == 1 else V @ V.mT * self.weight

    def root_mean_diagonal(self, sizes: Sequence[int]) -> Tensor:
        wide = wide_dtype(self.V.dtype)
        largest = self.V.abs().flatten(1).amax(1).to(wide)
        # No squares of very small numbers.
        unit = self.V.flatten(1).to(wide) / largest.clamp(min=torch.finfo(wide).tiny)[:, None]
        mean = unit.square().sum(1) / math.prod(sizes)
        return mean.sqrt() * largest * self.scale * math.sqrt(self.weight)

    def for_operands(self, dtype: torch.dtype, scale: Tensor | float) -> OuterProducts:
        if dtype != torch.float16:
            return replace(self, V=self.V.to(dtype), scale=self.scale * scale)
        V, size = in_float16(self.V)
        return replace(self, V=V, scale=self.scale * scale * size)

    def rows(self, rows: slice) -> OuterProducts:
        scale = self.scale[rows] if isinstance(self.scale, Tensor) else self.scale
        return replace(self, V=self.V[rows], scale=scale)

    def vectors(self) -> Tensor:
        """V with its scale."""
        if isinstance(self.scale, Tensor):
            return self.V * per_block(self.scale, self.V)
        return self.V if self.scale == 1.0 else self.V * self.scale


def _unit(V: Tensor) -> Tensor:
    """A power of two for each block, at least as large as its numbers, in fp32 or wider: (b,)."""
    largest = V.abs().flatten(1).amax(1).to(wide_dtype(V.dtype))
    return power_of_two(largest.clamp(min=torch.finfo(V.dtype).tiny))
