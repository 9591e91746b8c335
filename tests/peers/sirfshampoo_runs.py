"""Runs of the published `sirfshampoo.SIRFShampoo` (0.0.1, structures from `singd` 0.0.5).

Correspondence with method 7 of the specification
-------------------------------------------------
Call: `SIRFShampoo(model, params=None, lr, beta2, alpha1, alpha2, lam, kappa, batch_size, T,
structures, preconditioner_dtypes, verbose_init)`. The model is needed; `params` defaults to all
that require a gradient.

    ours                 theirs                 default  note
    lr                   lr                     1e-3     must be > 0
    precond_lr           beta2                  1e-2     must be > 0
    momentum             alpha1                 0.9      buffer from zero: M = U + κW at first
    riemannian_momentum  alpha2                 0.5      m from zero; m <- α₂m + (1-α₂)h
    damping              lam                    1e-3
    weight_decay         kappa                  0        added to U before momentum
    gamma                -                      1        fixed
    update_every         T                      1        int, or callable of the step (from 0)
    batch_size           batch_size             hook     int: fixed; callable of the model's inputs
    structures           structures             "dense"  name, or dict by number of axes
    (dtype of factors)   preconditioner_dtypes  None     dtype, or dict; None: the parameter's

- Axes: a parameter is squeezed (every axis of size one goes; a scalar becomes one axis of size one)
  and nothing is merged: a 3x3 convolution has four factors, a 1x1 convolution two, a linear weight
  with one output row is a vector. Weight and bias are separate. Vectors (biases, norms) get a dense
  d x d factor and an embedding a dense factor over its vocabulary, unless `structures` says
  otherwise. The dict of `structures` is keyed by the number of axes *after* squeezing.
- Start: K_n = I, m_n = 0, in the factor's dtype.
- h_n: the factor ½, the division by D_{-n} and the damping λ·∏_{j≠n}(tr(KⱼᵀKⱼ)/dⱼ)·KₙᵀKₙ are those
  of the specification: the package, too, deviates from the paper's appendix where the errata do. It
  uses K/√d in place of K and puts the powers of d back in the sums: an identity up to rounding.
- Truncation: K <- K - β₂/max(1, ‖m‖_F)·K m. The norm is the Frobenius norm of the *momentum* m (not
  of h), of the dense matrix that a structured m represents: doubled off-diagonals count as
  doubled, a Toeplitz coefficient counts as often as it occurs.
- Order in a step, parameter by parameter: h of every axis from the old K; all K replaced; direction
  KKᵀ with the new K on every axis; + κW; momentum; parameter. T skips the first two; the direction
  is computed at every step. The direction divides each K by max(1, √max|K|) and multiplies back
  afterwards: an identity up to rounding.
- Batch size: a callable is installed as a forward pre-hook of the model; the default reads the
  leading size of the first positional input. Forward passes in training mode between two steps add
  up (so gradient accumulation counts right), those in evaluation mode do not. A number is used as
  it is.
- Groups: the optimizer rewrites `param_groups` to one group per parameter, copying its options.

Where the package leaves the specification
------------------------------------------
1. B: the default counts sequences, not loss terms, in a language model; it is one number for the
   whole optimizer, not a group value; inputs passed by keyword do not reach the hook (IndexError).
2. γ is 1; there is no sum (γ = 0), no other norm, no update RMS, no cap, no other start.
3. Structures: "dense" is the only registered one. `singd` has others with the same interface; they
   are reached by extending `SUPPORTED_STRUCTURES` in a subclass (`sirfshampoo_class`). `singd` has
   no full triangular kind, only triangular ones with a diagonal block.
4. `singd`'s block-diagonal class takes its blocks for symmetric: its "transpose times matrix"
   multiplies by the untransposed blocks, and its KᵀK is KKᵀ. K is a product of symmetric matrices,
   so it is not symmetric from the second refresh on, and the package then uses K where Kᵀ belongs.
   On the tiny network the parameters are off by 3e-6 at the second step and by some 5 to 20 % from
   the 25th on (`corrected=False` shows it).
5. `singd`'s block-diagonal, hierarchical and Toeplitz classes refuse float64 (NotImplementedError
   in a helper that picks the lower of two precisions). `float64_structures` lifts that for a test.
6. `lr` and `beta2` equal to zero are refused, a parameter without gradient makes the step fail, and
   a closure is refused.
7. Factors, momenta of the factors, step count and batch size live outside `state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from peers.network import Trajectory, make_network, train

# names of `oracles.projections`, each with its published class or one written on its interface
STRUCTURES = (
    "dense",
    "diagonal",
    "block_diagonal:2",
    "lower_triangular",
    "upper_triangular",
    "lower_toeplitz",
    "upper_toeplitz",
    "hierarchical:3,2",
    "hierarchical:0,1",
    "hierarchical:1,0",
)


def structure_classes(*, corrected: bool = True) -> dict[str, Any]:
    """Structure name -> class with the interface of `singd.structures.base.StructuredMatrix`.

    The triangular classes are ours: two conversions on the base class, which does the rest densely.
    `corrected`: the block-diagonal class with its two transposes in place.
    """
    from singd.structures.base import StructuredMatrix
    from singd.structures.blockdiagonal import BlockDiagonalMatrixTemplate
    from singd.structures.dense import DenseMatrix
    from singd.structures.diagonal import DiagonalMatrix
    from singd.structures.hierarchical import Hierarchical3_2Matrix
    from singd.structures.triltoeplitz import TrilToeplitzMatrix
    from singd.structures.triltopleftdiag import TrilTopLeftDiagonalMatrix
    from singd.structures.triubottomrightdiag import TriuBottomRightDiagonalMatrix
    from singd.structures.triutoeplitz import TriuToeplitzMatrix

    class Triangular(StructuredMatrix):  # type: ignore[misc]
        WARN_NAIVE = False

        def __init__(self, matrix: Tensor) -> None:
            super().__init__()
            self.register_tensor(matrix, "matrix")

        def to_dense(self) -> Tensor:
            return self.matrix

    # adding both halves doubles the off-diagonals of a symmetric matrix, and leaves a matrix that
    # is already triangular (a product, a sum) as it is
    class Lower(Triangular):
        @classmethod
        def from_dense(cls, sym_mat: Tensor) -> Lower:
            return cls(sym_mat.tril() + sym_mat.triu(1).T)

    class Upper(Triangular):
        @classmethod
        def from_dense(cls, sym_mat: Tensor) -> Upper:
            return cls(sym_mat.triu() + sym_mat.tril(-1).T)

    class Block2(BlockDiagonalMatrixTemplate):  # type: ignore[misc]
        BLOCK_DIM = 2

    class CorrectedBlock2(Block2):
        def rmatmat(self, mat: Tensor) -> Tensor:
            return self.to_dense().T @ mat

        def from_inner(self, X: Tensor | None = None) -> CorrectedBlock2:
            left = self.to_dense().T if X is None else self.to_dense().T @ X
            return self.from_dense(left @ left.T)

    return {
        "dense": DenseMatrix,
        "diagonal": DiagonalMatrix,
        "block_diagonal:2": CorrectedBlock2 if corrected else Block2,
        "lower_triangular": Lower,
        "upper_triangular": Upper,
        "lower_toeplitz": TrilToeplitzMatrix,
        "upper_toeplitz": TriuToeplitzMatrix,
        "hierarchical:3,2": Hierarchical3_2Matrix,
        "hierarchical:0,1": TrilTopLeftDiagonalMatrix,
        "hierarchical:1,0": TriuBottomRightDiagonalMatrix,
    }


def sirfshampoo_class(*, corrected: bool = True) -> Any:
    """The published optimizer, with every structure registered (it registers "dense" alone)."""
    from sirfshampoo import SIRFShampoo

    class StructuredSIRFShampoo(SIRFShampoo):  # type: ignore[misc]
        SUPPORTED_STRUCTURES = structure_classes(corrected=corrected)

    return StructuredSIRFShampoo


@contextmanager
def float64_structures() -> Iterator[None]:
    """Let `singd`'s structures compute in float64, by replacing the helper that refuses it."""

    def float64_or_error(*dtypes: torch.dtype) -> torch.dtype:
        assert set(dtypes) == {torch.float64}
        return torch.float64

    modules = ("blockdiagonal", "hierarchical", "triltoeplitz", "triutoeplitz")
    with ExitStack() as stack:
        for module in modules:
            target = f"singd.structures.{module}.lowest_precision"
            stack.enter_context(mock.patch(target, float64_or_error))
        yield


def run_sirfshampoo(
    steps: int,
    *,
    structures: str | dict[int, Any] = "dense",
    lr: float = 0.05,
    precond_lr: float = 0.2,
    momentum: float = 0.9,
    riemannian_momentum: float = 0.5,
    damping: float = 0.01,
    weight_decay: float = 0.02,
    update_every: int | Callable[[int], bool] = 1,
    batch_size: int | None = None,
    corrected: bool = True,
    seed: int = 0,
) -> Trajectory:
    """Train the tiny network by SIRFShampoo in float64; words are ours, names of structures too.

    `batch_size` None: the package's own hook counts it. The trajectory holds dense factors K_n.
    """
    network = make_network(seed)
    named = dict(network.named_parameters())
    with float64_structures():
        optimizer = sirfshampoo_class(corrected=corrected)(
            network,
            lr=lr,
            beta2=precond_lr,
            alpha1=momentum,
            alpha2=riemannian_momentum,
            lam=damping,
            kappa=weight_decay,
            T=update_every,
            structures=structures,
            **({} if batch_size is None else {"batch_size": batch_size}),
        )

        def factors() -> dict[str, list[Tensor]]:
            return {
                name: [k.to_dense().clone() for k in ks]
                for name, ks in zip(named, optimizer.preconditioner, strict=True)
            }

        return train(network, lambda _: optimizer.step(), steps, factors)
