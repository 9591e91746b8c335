"""RF-Shampoo: the counterpart of inverse-free Shampoo that inverts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import BlockCurvature, Curvature
from rootfree.kernels.plan import Group, State, Structures
from rootfree.layout.tiles import Tile
from rootfree.methods.inverse_free import factor_rates
from rootfree.placement.sharded import Sharded
from rootfree.rules import rf_shampoo
from rootfree.rules.rf_shampoo import LARGEST_ROOT
from rootfree.shell.block_optimizer import BlockOptimizer
from rootfree.shell.checks import boolean
from rootfree.shell.options import BLOCK_OPTIONS, INVERSE_FREE_OPTIONS
from rootfree.shell.parameter_state import working_dtype
from rootfree.structures import per_block


def _direction(
    group: Group, structures: Structures, state: State, G: Tensor, H: BlockCurvature | None
) -> Tensor:
    axes = range(len(structures))
    inverses = [state[f"inverse{n}"] for n in axes]
    if H is not None:
        if "started" in state:
            _start_(structures, state, H.root_mean_diagonal(G.shape[1:]))
        rf_shampoo.update_factors_(
            [state[f"factor{n}"] for n in axes],
            inverses,
            H.for_operands(G.dtype, 1.0),
            beta2=factor_rates(group, structures, H, inverses[0]),
            lam=group["damping"],
            gamma=group["gamma"],
            norm=group["factor_norm"],
        )
    return rf_shampoo.precondition(G, inverses)


def _start_(structures: Structures, state: State, root: Tensor) -> None:
    """Sₙ <- (tr H/D)^{1/N}·I in blocks that meet their first curvature which is not zero.

    `root` (b,) is √(tr H/D), as in inverse-free Shampoo.
    """
    fresh = ~state["started"] & (root > 0) & root.isfinite()
    scale = torch.where(fresh, root.clamp(1e-15, LARGEST_ROOT).pow(2 / len(structures)), 1.0)
    for n in range(len(structures)):
        state[f"factor{n}"].mul_(per_block(scale, state[f"factor{n}"]))  # still I where it is fresh
        state[f"inverse{n}"].div_(per_block(scale, state[f"inverse{n}"]))
    state["started"] |= fresh


class RFShampoo(BlockOptimizer):
    r"""RF-Shampoo: Kronecker factors without roots, inverted by Cholesky.

    .. code-block:: text

        Δₙ = (B·G₍ₙ₎[⊗_{j≠n} Sⱼ⁻¹]G₍ₙ₎ᵀ + λ ∏_{j≠n} tr(Sⱼ⁻¹)·I)/D₋ₙ - γSₙ
        Sₙ <- Sₙ + β₂Δₙ/max(1, ‖Δₙ‖)                                        every T steps
        U  = G with Sₙ⁻¹ applied on every axis n;   M <- α₁ M + U + κ W;   W <- W - β₁ M

    :class:`rootfree.IFShampoo` approximates this method to first order. Use it as a reference: it
    is slower, needs float32 or float64, and takes twice the memory. It has the arguments and
    defaults of IFShampoo, except those of structures and dtypes; ``precond_lr`` may be up to 1.

    ``factor_norm`` measures the change Δₙ of a factor by the factor itself, ‖Sₙ^{-½} Δₙ Sₙ^{-½}‖/2,
    and ``init_scale`` c starts Sₙ at c⁻²·I: both are what they are in IFShampoo, Sₙ⁻¹ = KₙKₙᵀ. With
    ``factor_norm=None, init_scale=1.0, update_every=1, block_size=None, max_update_rms=None,
    nesterov=False, decoupled_weight_decay=False, rate_by_rank=False`` this is the paper's method.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rootfree.RFShampoo(model.parameters(), lr=1e-2, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 3)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    options = {
        **BLOCK_OPTIONS,
        **{name: INVERSE_FREE_OPTIONS[name] for name in ("factor_norm", "init_scale")},
        "rate_by_rank": boolean,
    }
    _direction = staticmethod(_direction)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 0.1,  # β₂
        momentum: float = 0.9,  # α₁
        damping: float = 1e-4,  # λ
        weight_decay: float = 0.0,  # κ
        nesterov: bool = True,
        decoupled_weight_decay: bool = True,
        gamma: float = 1.0,  # γ
        update_every: int | str = 2,  # T
        rate_by_rank: bool = True,
        block_size: int | None = 1024,
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
        dtype, scale = working_dtype(p), group["init_scale"]
        from_gradient = scale == "gradient"
        starts = {"factor": 1.0 if from_gradient else scale**-2}
        starts["inverse"] = 1 / starts["factor"]
        state = {
            f"{name}{n}": start * s.identity(tile.blocks, dtype=dtype, device=p.device)
            for n, s in enumerate(structures)
            for name, start in starts.items()
        }
        if from_gradient:
            state["started"] = torch.zeros(tile.blocks, dtype=torch.bool, device=p.device)
        return state

    def _why_not_recordable(self) -> str | None:
        return "it factorises with Cholesky, which waits for the device"
