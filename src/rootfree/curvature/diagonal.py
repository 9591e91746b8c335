"""H = diag(h)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DiagonalCurvature:
    """A diagonal curvature: an estimate of the Hessian's diagonal, the diagonal of a Fisher matrix.

    Entries may have any sign; every rule uses ``diag(|h|)``. The preconditioner has to be positive
    definite, and the absolute value is what keeps the size of a Newton step where the curvature is
    negative. A cut at zero would take such an entry for flat: its step would grow to 1/damping.

    Args:
        h: the diagonal, shaped like the parameter.

    Example:
        >>> import torch, rootfree
        >>> rootfree.DiagonalCurvature(torch.tensor([2.0, -3.0])).diagonal()
        tensor([2., 3.])
    """

    h: Tensor

    def diagonal(self) -> Tensor:
        """The diagonal of the H that is used."""
        return self.h.abs()
