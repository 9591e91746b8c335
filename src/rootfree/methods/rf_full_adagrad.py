"""Full-matrix AdaGrad and RMSProp without the root, with exact inverses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import BlockCurvature, Curvature, OuterProducts
from rootfree.kernels.plan import Group, State, Structures
from rootfree.layout.structured import flat_tiles
from rootfree.layout.tiles import Tile
from rootfree.methods.safeguard import bounded, damping, in_unit_, safeguard_state, unit_size
from rootfree.rules import LEAST_DAMPING
from rootfree.rules import full_matrix as rules
from rootfree.rules.rf_shampoo import inverse
from rootfree.shell.block_optimizer import BlockOptimizer
from rootfree.shell.checks import Real, boolean
from rootfree.shell.options import BLOCK_OPTIONS
from rootfree.shell.parameter_state import working_dtype


def _direction(
    group: Group, structures: Structures, state: State, G: Tensor, H: BlockCurvature | None
) -> Tensor:
    S_inv = state["inverse"]
    G = G.to(S_inv.dtype)
    if not group["safeguard"]:
        if H is not None:
            _refresh_(group, structures, state, H)
        return rules.apply(S_inv, G)
    if H is not None:
        _refresh_(group, structures, state, in_unit_(state, H, G.shape[1], S_inv.dtype))
    G, size = unit_size(G)
    return bounded(group, state, G, rules.apply(S_inv, G), size)


def _refresh_(group: Group, structures: Structures, state: State, H: BlockCurvature) -> None:
    S_inv, beta2, gamma = state["inverse"], group["precond_lr"], group["gamma"]
    if "factor" not in state:
        assert isinstance(H, OuterProducts)
        g = H.vectors().to(S_inv.dtype)
        rules.woodbury_(S_inv, g, beta2=beta2, B=H.weight, gamma=gamma)
    else:
        # S <- (1-β₂γ)S + β₂(H + λI)
        S = state["factor"].mul_(1 - beta2 * gamma)
        S.add_(H.dense().to(S.dtype), alpha=beta2)
        structures[0].add_to_diagonal_(S, beta2 * max(damping(group), LEAST_DAMPING))
        S_inv.copy_(inverse(S))


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

    options = {**BLOCK_OPTIONS, "precond_lr": Real(), "safeguard": boolean}
    _direction = staticmethod(_direction)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.06,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 0.01,  # β₂
        momentum: float = 0.95,  # α₁
        damping: float = 0.0,  # λ
        weight_decay: float = 0.0,  # κ
        nesterov: bool = True,
        decoupled_weight_decay: bool = False,
        gamma: float = 0.0,  # γ
        update_every: int | str = 1,  # T
        block_size: int | None = 1024,
        update_rms: float | None = None,
        max_update_rms: float | None = None,
        safeguard: bool = True,
        state_dtype: torch.dtype | None = None,
        curvature: Curvature | None = None,  # H
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _checked_options(self, group: Group) -> dict[str, Any]:
        values = super()._checked_options(group)
        if values["precond_lr"] * values["gamma"] >= 1:
            raise ValueError(
                f"precond_lr must be below 1/gamma = {1 / values['gamma']:g}, "
                f"got {values['precond_lr']!r}"
            )
        return values

    def _tiles(self, p: Tensor, group: Group) -> list[tuple[Tile, Structures]]:
        return flat_tiles(self._pairs.shape_of(p), block_size=group["block_size"])

    def _block_state(self, p: Tensor, tile: Tile, structures: Structures, group: Group) -> State:
        (dense,) = structures
        # S is kept beside its inverse, unless the inverse can be updated alone: by rank one.
        rank_one = damping(group) == 0 and self._curvature is None
        names = ("inverse",) if rank_one else ("inverse", "factor")
        # Forgetting by rank one amplifies rounding: fp32 loses definiteness within 400 steps.
        forgets = rank_one and group["gamma"] > 0
        dtype = torch.float64 if forgets else working_dtype(p)
        b, device = tile.blocks, p.device
        state = {name: dense.identity(b, dtype=dtype, device=device) for name in names}
        if group["safeguard"]:
            state |= safeguard_state(b, dense.d, dtype=dtype, device=device)
        return state

    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        state, found = super()._init_state(p, group), self.state.get(p) or {}
        for key in state:  # damping was turned on: S is what its inverse says
            known = found.get(key.replace("factor", "inverse"))
            if key.endswith("factor") and key not in found and known is not None:
                state[key] = inverse(known)
        return state

    def _why_not_recordable(self) -> str | None:
        if all(damping(group) == 0 for group in self.param_groups):
            return None
        return "with damping it factorises with Cholesky, which waits for the device"
