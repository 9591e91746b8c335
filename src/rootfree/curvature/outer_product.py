"""H = B·g gᵀ, the gradient outer product of an averaged loss: the default curvature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rootfree.blocks import matricise, multiply_axis, per_block
from rootfree.structures import Structure

# Curvature beyond this is as good as infinite: the factor's step is normalised. Without the limit
# the squared norm of a tangent vector could leave the range of fp32.
_LARGEST = 1e15


@dataclass(frozen=True)
class GradientOuterProduct:
    """B·vec(G)vec(G)ᵀ for a stack of blocks G (b, d_1..d_N); `scale` (b,) multiplies G."""

    G: Tensor
    B: int
    scale: Tensor | float = 1.0

    def in_frame(
        self, Ks: Sequence[Tensor], structures: Sequence[Structure]
    ) -> list[tuple[Tensor, Tensor]]:
        """For every axis n: Π(Ĝ₍ₙ₎Ĝ₍ₙ₎ᵀ) and its weight B/D₋ₙ; Ĝ is G with Kⱼᵀ on each axis j.

        Returned as (packed gram, weight (b,)): the gram is of a Ĝ scaled to entries of at most one,
        so that no product overflows or vanishes in half precision; the weight makes up for it.
        """
        Ghat = self.G
        for n, (K, structure) in enumerate(zip(Ks, structures, strict=True)):
            Ghat = multiply_axis(Ghat, n, partial(structure.apply_transposed, K))
        wide = torch.promote_types(Ghat.dtype, torch.float32)
        largest = Ghat.abs().flatten(1).amax(1).to(wide).clamp(min=torch.finfo(Ghat.dtype).tiny)
        # A power of two: dividing by it is exact.
        unit = torch.exp2(torch.ceil(torch.log2(largest)))
        Ghat = Ghat / per_block(unit.to(Ghat.dtype), Ghat)
        # B first: squares of small gradients would underflow on their own.
        weight = (math.sqrt(self.B) * unit * self.scale).square().clamp(max=_LARGEST)
        sizes = Ghat.shape[1:]
        return [
            (
                structure.project_gram(matricise(Ghat, n)),
                weight / (math.prod(sizes) / sizes[n]),
            )
            for n, structure in enumerate(structures)
        ]

    def contracted(self, inverses: Sequence[Tensor]) -> list[Tensor]:
        """For every axis n: B/D₋ₙ·G₍ₙ₎[⊗_{j≠n} Sⱼ⁻¹]G₍ₙ₎ᵀ, dense (b, d_n, d_n)."""
        sizes = self.G.shape[1:]
        terms = []
        for n in range(len(sizes)):
            X = self.G
            for j, S_inv in enumerate(inverses):
                if j != n:
                    X = multiply_axis(X, j, partial(torch.matmul, S_inv))
            gram = matricise(self.G, n) @ matricise(X, n).mT
            terms.append(gram * (self.B * sizes[n] / math.prod(sizes)))
        return terms
