"""H = Σᵢ vec(Vᵢ)vec(Vᵢ)ᵀ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
        wide = torch.promote_types(self.V.dtype, torch.float32)  # halves overflow when squared
        return self.V.to(wide).square().sum(0)
