"""Inverse-free Shampoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import Curvature
from rootfree.kernels import factors
from rootfree.kernels.plan import Group, State, Structures
from rootfree.layout.tiles import Tile
from rootfree.methods.inverse_free import direction, factor_state
from rootfree.placement.sharded import Sharded
from rootfree.shell.block_optimizer import BlockOptimizer
from rootfree.shell.checks import boolean
from rootfree.shell.options import INVERSE_FREE_OPTIONS


class IFShampoo(BlockOptimizer):
    r"""Inverse-free Shampoo: a Kronecker-factored preconditioner moved by matrix products alone.

    .. code-block:: text

        Ĝ  = G with Kⱼᵀ applied on every axis j
        hₙ = ½(B·Ĝ₍ₙ₎Ĝ₍ₙ₎ᵀ/D₋ₙ + λ ∏_{j≠n} tr(KⱼᵀKⱼ)/dⱼ · KₙᵀKₙ - γI)     every T steps
        mₙ <- α₂ mₙ + (1 - α₂) hₙ
        Kₙ <- Kₙ (I - β₂ mₙ/max(1, ‖mₙ‖))                                 all from the old K
        U  = G with KₙKₙᵀ applied on every axis n
        M  <- α₁ M + U + κ W
        W  <- W - β₁ M

    There is no root and no inverse, so it runs in bfloat16, and there is no decomposition that
    could fail. It accepts tensors of any order: axes of size one are dropped, small input axes are
    merged, and axes longer than ``block_size`` are cut. Blocks of equal shape share batched calls.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer. Groups with
            ``companion="adamw"`` are left to AdamW (``lr``, ``betas``, ``eps``, ``weight_decay``);
            :func:`rootfree.parameter_groups` makes them.
        lr: β₁, step size of the parameters (a number or a one-element tensor).
        batch_size: B, the number of loss terms that the loss averages; no default, see
            :class:`rootfree.RFRMSprop`.
        precond_lr: β₂, step size of the factors.
        momentum: α₁, heavy-ball momentum on the direction, without dampening.
        riemannian_momentum: α₂, momentum on the tangent vector of the factors (costs their memory).
        damping: λ, added to the curvature.
        weight_decay: κ.
        nesterov: the step is U + α₁M in place of M.
        decoupled_weight_decay: False: κW enters the momentum, as in the paper. True, and always
            with ``update_rms``: W <- (1 - β₁κ)W.
        gamma: γ, 1 averages the curvature (Shampoo as RMSProp), 0 sums it (as AdaGrad).
        update_every: T, or a schedule: "warm:<T>" refreshes in each of the first 10 T steps, then
            every T-th; "logarithmic" and "logarithmic:<T>" refresh at every step early and ever
            more rarely (at most every T-th step) later; "module:function" names a function of the
            step count that returns whether to refresh. Take "warm:<T>" for T beyond 2: factors that
            start late cost more than the refreshes.
        rate_by_rank: β₂ of axis n is multiplied by min(1, D₋ₙ/dₙ): one gradient has D₋ₙ columns to
            say something about a dₙ×dₙ matrix (with a diagonal factor about single numbers), and
            the factor of a long axis beside short ones averages over as many more of them. Not
            with a given curvature. False: one β₂ for all axes, as in the paper.
        structure: "auto", a name, a tuple of names (one per axis), or a dict from the number of
            axes to either. Names: dense, diagonal, block_diagonal:<k>, lower_triangular,
            upper_triangular, hierarchical:<k>, lower_toeplitz, upper_toeplitz. "auto" is dense,
            but diagonal for vectors; for embeddings see :func:`rootfree.parameter_groups`.
        block_size: longer axes are cut into nearly equal blocks, and input axes merged up to this
            size; None: neither.
        factor_dtype: dtype of the factors. None: float32 (float64 for float64 parameters).
            ``torch.bfloat16`` halves their memory and rounds stochastically.
        matmul_dtype: dtype of the matrix products. None: bfloat16 on CUDA, float32 elsewhere.
        factor_norm: "spectral" (the rate does not depend on the width), "frobenius" (the paper's),
            or None (no normalisation: for studies of the plain rule).
        update_rms: None (the paper's step), or r: the direction after momentum is rescaled to RMS r
            per parameter. With 0.2, learning rate and weight decay tuned for AdamW can be kept.
        max_update_rms: cap on the direction's RMS per parameter, before momentum; None: no cap.
            The RMS of a step is at most β₁·cap/(1 - α₁): with the defaults 0.002, twice what AdamW
            does at a learning rate of 0.001.
        max_update: limit on each element of the direction, before momentum; None: no limit.
        init_scale: Kₙ starts at this multiple of I; "gradient": at (tr H/D)^{-1/(2N)}·I, D the
            number of elements, from the first curvature that is not zero; for the default curvature
            that is (B·mean(G²))^{-1/(2N)}·I.
        curvature: where H comes from, a :class:`rootfree.Curvature` such as a recorder of KFAC
            factors, in place of B·ggᵀ: hₙ then has the partial trace of KᵀHK. It is not part of
            the checkpoint.
        fused: None: fused kernels on a GPU with Triton; True requires them, False disables them.
            Gathering and the tail of a step always have kernels; directions have them for dense
            factors with bf16 products and, with the default curvature, for vectors, and use batched
            torch operations otherwise. Directions are replayed from CUDA graphs where these take at
            most 1 % of the device's memory (8 bytes a parameter, 32 with a given curvature).
        placement: None, or :class:`rootfree.Sharded`, which divides blocks among ranks (always so
            for sharded parameters).

    The other arguments are those of :class:`rootfree.RFRMSprop`; ``state_dtype`` is that of the
    momentum.

    With ``structure="dense", block_size=None, update_every=1, factor_norm="frobenius",
    init_scale=1.0, max_update_rms=None, nesterov=False, decoupled_weight_decay=False,
    rate_by_rank=False`` this is the paper's method, on every parameter. For low memory take
    ``factor_dtype=torch.bfloat16, state_dtype=torch.bfloat16``.

    The page *Which optimizer, which settings* shows what the defaults do, and how much the settings
    matter.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rootfree.IFShampoo(model.parameters(), lr=1e-2, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 3)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
        >>> print(optimizer.summary().splitlines()[1])
        0          3x4    dense 3 x dense 4          157
    """

    options = {**INVERSE_FREE_OPTIONS, "rate_by_rank": boolean}
    _direction = staticmethod(direction)
    _kernel = staticmethod(factors.direction_)
    _kernel_takes_curvature = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 0.1,  # β₂
        momentum: float = 0.9,  # α₁
        riemannian_momentum: float = 0.0,  # α₂
        damping: float = 1e-4,  # λ
        weight_decay: float = 0.0,  # κ
        nesterov: bool = True,
        decoupled_weight_decay: bool = True,
        gamma: float = 1.0,  # γ
        update_every: int | str = 2,  # T
        rate_by_rank: bool = True,
        structure: Any = "auto",
        block_size: int | None = 1024,
        factor_dtype: torch.dtype | None = None,
        matmul_dtype: torch.dtype | None = None,
        factor_norm: str | None = "spectral",
        update_rms: float | None = None,
        max_update_rms: float | None = 0.02,
        max_update: float | None = None,
        init_scale: float | str = "gradient",
        state_dtype: torch.dtype | None = None,
        curvature: Curvature | None = None,  # H
        fused: bool | None = None,
        capturable: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        nonfinite: str = "skip",
        placement: Sharded | None = None,
    ) -> None:
        super().__init__(params, locals())

    def _block_state(self, p: Tensor, tile: Tile, structures: Structures, group: Group) -> State:
        return factor_state(p, tile, structures, group, salt=len(self.state))
