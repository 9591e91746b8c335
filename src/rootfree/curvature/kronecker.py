"""H = U₁ ⊗ … ⊗ U_M."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KroneckerCurvature:
    """A Kronecker product, as KFAC has it; its axes need not be those of the preconditioner.

    Args:
        factors: one for each entry of `axes`: positive semi-definite (d, d), or (d,) for a diagonal
            one. H is their Kronecker product in the order in which the parameter lies in memory.
        axes: the shape that the parameter is viewed with, e.g. (outputs, inputs·height·width).

    Example:
        >>> import torch, rootfree
        >>> H = rootfree.KroneckerCurvature((2 * torch.eye(3), torch.tensor([1.0, 5.0])), (3, 2))
        >>> H.diagonal()
        tensor([[ 2., 10.],
                [ 2., 10.],
                [ 2., 10.]])
    """

    factors: tuple[Tensor, ...]
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        shapes = [tuple(U.shape) for U in self.factors]
        if len(shapes) != len(self.axes) or not shapes:
            raise ValueError(f"{len(shapes)} factors for {len(self.axes)} axes {self.axes}")
        for n, (shape, d) in enumerate(zip(shapes, self.axes, strict=True)):
            if shape not in ((d, d), (d,)):
                raise ValueError(
                    f"factor {n} must have shape ({d}, {d}), or ({d},) for a diagonal one; "
                    f"got {shape}"
                )

    def diagonal(self) -> Tensor:
        """The diagonal of H, with shape `axes`."""
        wide = torch.promote_types(self.factors[0].dtype, torch.float32)
        product = self.factors[0].new_ones((), dtype=wide)
        for U in self.factors:
            diagonal = U if U.dim() == 1 else U.diagonal()
            product = product.unsqueeze(-1) * diagonal.to(wide)
        return product.view(self.axes)

    @property
    def numel(self) -> int:
        """The number of elements of the parameter."""
        return math.prod(self.axes)
