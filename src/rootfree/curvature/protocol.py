"""What an optimizer asks of a curvature that the user passes: ``IFShampoo(params, curvature=...)``.

Normalisation. H is the curvature of the loss that was differentiated, as the default B·ḡḡᵀ is: for
a loss that averages B terms (1/B)Σᵢ gᵢgᵢᵀ (gᵢ the gradient of term i) or the Gauss-Newton matrix of
the average; for a summed loss, with batch_size=1, the sum. Averaged and summed losses then give the
same steps (for preconditioners that start scaled alike).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from rootfree.curvature.diagonal import DiagonalCurvature
from rootfree.curvature.kronecker import KroneckerCurvature
from rootfree.curvature.outer_products import SumOfOuterProducts

#: H of one parameter, in one of three forms
ParameterCurvature: TypeAlias = SumOfOuterProducts | KroneckerCurvature | DiagonalCurvature


@runtime_checkable
class Curvature(Protocol):
    """A source of curvature matrices, asked by the optimizer at the steps that use them.

    A step that refreshes the preconditioner calls ``check``, then ``of`` for each parameter with a
    gradient, all before anything is changed, and ``used`` at its end; other steps call nothing.
    They are called under ``torch.no_grad()``.

    Example:
        >>> import torch, rootfree
        >>> class SquaredGradients:
        ...     def joint(self):
        ...         return ()
        ...     def check(self, params):
        ...         pass
        ...     def of(self, p, *, batch_size):
        ...         return rootfree.DiagonalCurvature(batch_size * p.grad**2)
        ...     def used(self):
        ...         pass
        >>> isinstance(SquaredGradients(), rootfree.Curvature)
        True
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rootfree.RFRMSprop(
        ...     model.parameters(), batch_size=1, curvature=SquaredGradients()
        ... )
        >>> model(torch.randn(4)).sum().backward()
        >>> optimizer.step()
    """

    def joint(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Pairs (weight, bias) that are one matrix [W b]; asked once, by the constructor.

        W is the weight viewed as (outputs, the rest), b the bias as its last column.
        """

    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """H of the loss by `p`, of whose terms `batch_size` are averaged.

        A joint pair is asked for by its weight, and H is of the matrix [W b]. None: not known, and
        the gradient outer product B·ggᵀ is used.
        """

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise RuntimeError if `of` could not answer for these parameters."""

    def used(self) -> None:
        """The step is done: what was recorded for it may be dropped."""
