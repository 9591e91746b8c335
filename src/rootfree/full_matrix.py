"""Full-matrix methods: the preconditioner couples all elements of a parameter (of a block)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.block_optimizer import BlockOptimizer
from rootfree.blocks import Tile, tiles_of
from rootfree.curvature import BlockCurvature, Curvature
from rootfree.factor_options import BLOCK_OPTIONS, INVERSE_FREE_OPTIONS
from rootfree.inverse_free import direction, factor_state, gradient_dtype
from rootfree.optimizer import Group
from rootfree.options import OneOf, Real
from rootfree.precision import working_dtype
from rootfree.rules import full_matrix as rules
from rootfree.rules.rf_shampoo import inverse
from rootfree.structures import Dense, Structure

Structures = tuple[Structure, ...]
Tiles = list[tuple[Tile, Structures]]


def _flat_tiles(shape: tuple[int, ...], group: Group) -> Tiles:
    """The parameter as one vector, cut to the block size."""
    tiles = tiles_of((math.prod(shape),), (group["block_size"],))
    return [(tile, (Dense(tile.sizes[0]),)) for tile in tiles]


def _dense(H: BlockCurvature | None, g: Tensor, *, B: int) -> Tensor:
    """H (b, d, d), a new tensor; B·ggᵀ where none is given."""
    return B * g.unsqueeze(2) * g.unsqueeze(1) if H is None else H.dense().to(g.dtype)


class RFFullAdagrad(BlockOptimizer):
    r"""RF full-matrix AdaGrad (γ = 0) and, with ``gamma=1``, full-matrix RMSProp, without the root.

    .. code-block:: text

        S <- (1 - β₂γ)S + β₂(H + λI), H = B·ggᵀ;   U = S⁻¹g;   m <- α₁ m + U + κ p;   p <- p - β₁ m

    The inverse is exact: by the rank-one formula on S⁻¹, in O(d²), when damping is 0 (and H the
    default), and by Cholesky, in O(d³), otherwise. A parameter with d elements has a d×d
    preconditioner: for convex problems and small models; ``block_size`` cuts longer parameters into
    blocks of that many elements. The arguments are those of :class:`rootfree.RFShampoo`;
    ``precond_lr`` may be any non-negative number when γ = 0.

    The defaults suit convex problems; they were not tuned on networks.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFFullAdagrad(model.parameters(), lr=0.1, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    options = {**BLOCK_OPTIONS, "precond_lr": Real()}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 0.1,  # β₂
        momentum: float = 0.0,  # α₁
        damping: float = 0.0,  # λ
        weight_decay: float = 0.0,  # κ
        gamma: float = 0.0,  # γ
        update_every: int | str = 1,  # T
        block_size: int | None = 1024,
        update_rms: float | None = None,
        max_update_rms: float | None = None,
        state_dtype: torch.dtype | None = None,
        curvature: Curvature | None = None,  # H
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        given = locals()
        options = {name: given[name] for name in self.options}
        super().__init__(params, options, curvature=curvature, fused=fused, capturable=capturable)

    def _checked_options(self, group: Group) -> dict[str, Any]:
        values = super()._checked_options(group)
        if values["precond_lr"] * values["gamma"] >= 1:
            raise ValueError(
                f"precond_lr must be below 1/gamma = {1 / values['gamma']:g}, "
                f"got {values['precond_lr']!r}"
            )
        return values

    def _tiles(self, p: Tensor, group: Group) -> Tiles:
        return _flat_tiles(self._shape_of(p), group)

    def _block_state(
        self, p: Tensor, tile: Tile, structures: Structures, group: Group
    ) -> dict[str, Tensor]:
        (dense,) = structures
        # S is kept beside its inverse, unless the inverse can be updated alone: by rank one.
        rank_one = group["damping"] == 0 and self._curvature is None
        names = ("inverse",) if rank_one else ("inverse", "factor")
        return {
            name: dense.identity(tile.blocks, dtype=working_dtype(p), device=p.device)
            for name in names
        }

    def _direction(
        self,
        group: Group,
        structures: Structures,
        state: dict[str, Tensor],
        G: Tensor,
        refresh: bool,
        H: BlockCurvature | None,
    ) -> Tensor:
        S_inv, B = state["inverse"], group["batch_size"]
        G = G.to(S_inv.dtype)  # the model may have been cast since
        beta2, gamma = group["precond_lr"], group["gamma"]
        if refresh and "factor" in state:
            # S <- (1-β₂γ)S + β₂(H + λI)
            S = state["factor"].mul_(1 - beta2 * gamma)
            S.add_(_dense(H, G, B=B), alpha=beta2)
            structures[0].add_to_diagonal_(S, beta2 * group["damping"])
            S_inv.copy_(inverse(S))
        elif refresh:
            rules.woodbury_(S_inv, G, beta2=beta2, B=B, gamma=gamma)
        return rules.apply(S_inv, G)


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

    The defaults suit convex problems; they were not tuned on networks.

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
        gamma: float = 0.0,  # γ
        update_every: int | str = 1,  # T
        block_size: int | None = 1024,
        factor_dtype: torch.dtype | None = None,
        matmul_dtype: torch.dtype | None = None,
        factor_norm: str | None = "spectral",
        update_rms: float | None = None,
        max_update_rms: float | None = None,
        init_scale: float | str = 1.0,
        state_dtype: torch.dtype | None = None,
        curvature: Curvature | None = None,  # H
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        given = locals()
        options = {name: given[name] for name in self.options}
        super().__init__(params, options, curvature=curvature, fused=fused, capturable=capturable)

    def _tiles(self, p: Tensor, group: Group) -> Tiles:
        return _flat_tiles(self._shape_of(p), group)

    def _block_state(
        self, p: Tensor, tile: Tile, structures: Structures, group: Group
    ) -> dict[str, Tensor]:
        if group["form"] == "factor":
            return factor_state(p, tile, structures, group, salt=len(self.state))
        return {
            "inverse": structures[0].identity(tile.blocks, dtype=working_dtype(p), device=p.device)
        }

    def _direction(
        self,
        group: Group,
        structures: Structures,
        state: dict[str, Tensor],
        G: Tensor,
        refresh: bool,
        H: BlockCurvature | None,
    ) -> Tensor:
        if group["form"] == "factor":
            return direction(group, structures, state, G, refresh, H)
        G = G.to(state["inverse"].dtype)  # the model may have been cast since
        if refresh:
            self._refresh_covariance_(group, state["inverse"], G, H)
        return rules.apply(state["inverse"], G)

    def _gradient_dtype(
        self, p: Tensor, structures: tuple[Structure, ...], group: Group
    ) -> torch.dtype:
        if group["form"] == "covariance":
            return working_dtype(p)
        return gradient_dtype(p, structures, group)

    def _checked_options(self, group: Group) -> dict[str, Any]:
        values = super()._checked_options(group)
        if values["form"] == "covariance":
            for name, only in (("init_scale", 1.0), ("riemannian_momentum", 0.0)):
                if values[name] != only:
                    raise ValueError(
                        f"{name} must be {only} with form='covariance', got {values[name]!r}"
                    )
        return values

    def _refresh_covariance_(
        self, group: Group, S_inv: Tensor, g: Tensor, given: BlockCurvature | None
    ) -> None:
        B, lam, gamma = group["batch_size"], group["damping"], group["gamma"]
        beta2 = torch.full((len(g), 1, 1), group["precond_lr"], dtype=g.dtype, device=g.device)
        rank_one = lam == 0 and given is None
        if not rank_one:
            H = _dense(given, g, B=B)
            H.diagonal(dim1=-2, dim2=-1).add_(lam)
        if group["factor_norm"] is not None:
            # β₂ <- β₂/max(1, ½ tr(S⁻¹(H + λI)))
            trace = B * (g * rules.apply(S_inv, g)).sum(-1) if rank_one else (S_inv * H).sum((1, 2))
            beta2 = beta2 / (trace / 2).clamp(min=1.0)[:, None, None]
        if rank_one:
            rules.if_covariance_rank_one_(S_inv, g, beta2=beta2, B=B, gamma=gamma)
        else:
            rules.if_covariance_(S_inv, H, beta2=beta2, gamma=gamma)
        # Rounding may leave S⁻¹ indefinite where it is very small, and from there it would blow up.
        diagonal = S_inv.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(4 * torch.finfo(S_inv.dtype).eps * diagonal.mean(-1, keepdim=True))
