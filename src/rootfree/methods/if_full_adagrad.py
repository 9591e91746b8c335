"""Inverse-free full-matrix AdaGrad and RMSProp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import BlockCurvature, Curvature, OuterProducts
from rootfree.kernels.plan import Group, State, Structures
from rootfree.layout.structured import flat_tiles
from rootfree.layout.tiles import Tile
from rootfree.methods.inverse_free import direction, factor_state, product_dtype
from rootfree.rules import full_matrix as rules
from rootfree.shell.block_optimizer import BlockOptimizer
from rootfree.shell.checks import OneOf
from rootfree.shell.options import INVERSE_FREE_OPTIONS
from rootfree.shell.parameter_state import working_dtype


def _direction(
    group: Group, structures: Structures, state: State, G: Tensor, H: BlockCurvature | None
) -> Tensor:
    if group["form"] == "factor":
        return direction(group, structures, state, G, H)
    G = G.to(state["inverse"].dtype)
    if H is not None:
        _refresh_covariance_(group, state["inverse"], G, H)
    return rules.apply(state["inverse"], G)


def _refresh_covariance_(group: Group, S_inv: Tensor, g: Tensor, H: BlockCurvature) -> None:
    lam, gamma = group["damping"], group["gamma"]
    beta2 = torch.full((len(g), 1, 1), group["precond_lr"], dtype=g.dtype, device=g.device)
    rank_one = lam == 0 and isinstance(H, OuterProducts) and H.V.dim() == g.dim()  # B·ggᵀ
    if rank_one:
        g, B = rules.unit_gradient(g, B=group["batch_size"])
    else:
        dense = H.dense().to(g.dtype)
        dense.diagonal(dim1=-2, dim2=-1).add_(lam)
    if group["factor_norm"] is not None:
        # β₂ <- β₂/max(1, ½ tr(S⁻¹(H + λI)))
        if rank_one:
            trace = B * (g * rules.apply(S_inv, g)).sum(-1)[:, None, None]
        else:
            trace = (S_inv * dense).sum((1, 2), keepdim=True)
        beta2 = beta2 / (trace / 2).clamp(min=1.0)
    if rank_one:
        rules.if_covariance_rank_one_(S_inv, g, beta2=beta2, B=B, gamma=gamma)
    else:
        rules.if_covariance_(S_inv, dense, beta2=beta2, gamma=gamma)
    # Rounding may leave S⁻¹ indefinite where it is very small, and from there it would blow up.
    diagonal = S_inv.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(4 * torch.finfo(S_inv.dtype).eps * diagonal.mean(-1, keepdim=True))
    rules.limit_(S_inv)


class IFFullAdagrad(BlockOptimizer):
    r"""Inverse-free full-matrix AdaGrad (γ = 0) and RMSProp (γ = 1), in two forms.

    .. code-block:: text

        covariance:  S⁻¹ <- (1+β₂γ)S⁻¹ - β₂S⁻¹HS⁻¹ + β₂²/2·W,        H = B·ggᵀ + λI
                     W = S⁻¹HS⁻¹HS⁻¹ - 2γS⁻¹HS⁻¹ + γ²S⁻¹
        factor:      S⁻¹ = AAᵀ,  m <- α₂ m + (1-α₂)·½(AᵀHA - γI)
                     A <- A(I - β₂ m/max(1, ‖m‖))

    Both equal :class:`rootfree.RFFullAdagrad` to first order in β₂, and both stay positive definite
    without an inverse or a root. The covariance form costs O(d²) when damping is 0.

    The arguments are those of :class:`rootfree.RFFullAdagrad` and :class:`rootfree.IFShampoo`, and
    two more:

    Args:
        form: "factor" or "covariance".
        factor_norm: what bounds the step of the preconditioner. In the covariance form any value
            but None divides β₂ by max(1, ½ tr(S⁻¹H)), an upper bound of the spectral norm: without
            it a gradient with β₂B·gᵀS⁻¹g > 2 makes S⁻¹ grow instead of shrink.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.IFFullAdagrad(model.parameters(), lr=0.1, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    options = {
        **{name: check for name, check in INVERSE_FREE_OPTIONS.items() if name != "structure"},
        "form": OneOf(("factor", "covariance")),
    }
    _direction = staticmethod(_direction)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,  # β₁
        *,
        form: str = "factor",
        batch_size: int | None = None,  # B
        precond_lr: float = 0.1,  # β₂
        momentum: float = 0.0,  # α₁
        riemannian_momentum: float = 0.0,  # α₂
        damping: float = 0.0,  # λ
        weight_decay: float = 0.0,  # κ
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        gamma: float = 0.0,  # γ
        update_every: int | str = 1,  # T
        block_size: int | None = 1024,
        factor_dtype: torch.dtype | None = None,
        matmul_dtype: torch.dtype | None = None,
        factor_norm: str | None = "spectral",
        update_rms: float | None = None,
        max_update_rms: float | None = None,
        max_update: float | None = None,
        init_scale: float | str = 1.0,
        state_dtype: torch.dtype | None = None,
        curvature: Curvature | None = None,  # H
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _tiles(self, p: Tensor, group: Group) -> list[tuple[Tile, Structures]]:
        return flat_tiles(self._pairs.shape_of(p), block_size=group["block_size"])

    def _block_state(self, p: Tensor, tile: Tile, structures: Structures, group: Group) -> State:
        if group["form"] == "factor":
            return factor_state(p, tile, structures, group, salt=len(self.state))
        # As in RFFullAdagrad.
        forgets = group["gamma"] > 0 and group["damping"] == 0
        dtype = torch.float64 if forgets else working_dtype(p)
        return {"inverse": structures[0].identity(tile.blocks, dtype=dtype, device=p.device)}

    def _products(self, p: Tensor, structures: Structures, group: Group) -> torch.dtype:
        if group["form"] == "covariance":
            return working_dtype(p)
        return product_dtype(p, structures, group)

    def _checked_options(self, group: Group) -> dict[str, Any]:
        values = super()._checked_options(group)
        if values["form"] == "covariance":
            for name, only in (("init_scale", 1.0), ("riemannian_momentum", 0.0)):
                if values[name] != only:
                    raise ValueError(
                        f"{name} must be {only} with form='covariance', got {values[name]!r}"
                    )
        return values
