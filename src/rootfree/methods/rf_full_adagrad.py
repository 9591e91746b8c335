"""Full-matrix AdaGrad and RMSProp without the root, with exact inverses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import BlockCurvature, Curvature, OuterProducts
from rootfree.kernels.plan import Group, State, Structures
from rootfree.layout.tiles import Tile
from rootfree.methods.safeguard import bounded, damping, in_unit_, safeguard_state, unit_size
from rootfree.placement.sharded import Sharded
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
    if group["safeguard"]:
        if H is not None:
            _refresh_(group, structures, state, in_unit_(state, H, G.shape[1], S_inv.dtype))
        G, size = unit_size(G)
        return bounded(group, state, G, rules.apply(S_inv, G), size, refresh=H is not None)
    # The paper's rule, in the range of the precision.
    if H is None:
        return rules.apply(S_inv, G)
    H, c = rules.in_range(H, G.shape[1], S_inv.dtype)
    found = _refresh_(group, structures, state, H)
    U = rules.apply(S_inv, G * c.unsqueeze(-1))
    return U if found is None else torch.where(found[1], found[0], U)


def _refresh_(
    group: Group, structures: Structures, state: State, H: BlockCurvature
) -> tuple[Tensor, Tensor] | None:
    """Bring H into S and S⁻¹; a rank-one update returns what `woodbury_` does.  Changes state."""
    S_inv, beta2, gamma = state["inverse"], group["precond_lr"], group["gamma"]
    if "factor" not in state:
        assert isinstance(H, OuterProducts)
        g = H.vectors().to(S_inv.dtype)
        return rules.woodbury_(S_inv, g, beta2=beta2, B=H.weight, gamma=gamma)
    # S <- (1-β₂γ)S + β₂(H + λI)
    S = state["factor"].mul_(1 - beta2 * gamma)
    S.add_(H.dense().to(S.dtype), alpha=beta2)
    structures[0].add_to_diagonal_(S, beta2 * max(damping(group), LEAST_DAMPING))
    if _outlives_precision(group, structures[0].d):
        S = S + 1e-8 * torch.diag_embed(S.diagonal(dim1=-2, dim2=-1))
    S_inv.copy_(inverse(S))
    return None


def _outlives_precision(group: Group, d: int) -> bool:
    """Whether S, undamped, forgets before d gradients have come in: (1-β₂γ)^d is below 1e-13.

    Then S is singular up to rounding, even in float64.
    """
    kept = 1 - group["precond_lr"] * group["gamma"]
    return bool(damping(group) == 0 and d * math.log(kept) < -30)


class RFFullAdagrad(BlockOptimizer):
    r"""RF full-matrix AdaGrad (γ = 0) and, with ``gamma=1``, full-matrix RMSProp, without the root.

    .. code-block:: text

        S <- (1 - β₂γ)S + β₂(H + λI), H = B·ggᵀ;   U = S⁻¹g;   m <- α₁ m + U + κ p;   p <- p - β₁ m

    The inverse is exact: by the rank-one formula on S⁻¹, in O(d²), when γ and damping are 0 (and H
    the default), and by Cholesky, in O(d³), otherwise. A parameter with d elements has a d×d
    preconditioner: for convex problems and small models; ``block_size`` cuts longer parameters into
    blocks of that many elements. The arguments are those of :class:`rootfree.RFShampoo`;
    ``precond_lr`` may be any non-negative number when γ = 0.

    Args:
        safeguard: measure the curvature in a unit of its own and guard the first steps; False is
            the paper's rule.

    With ``safeguard`` the curvature is measured in a unit s that the first steps
    find, H/s, and γ is added to the damping, so that S rests at I and not at zero.
    The method then begins as gradient descent with step size ``lr``, and S holds back the
    directions whose gradients stay large. It works for any scale of the targets, and outliers do
    not stop it. Without it S grows with B times the *mean* gradient squared until nothing moves.
    The paper's rule is ``safeguard=False``; use ``lr=0.1, precond_lr=0.1, momentum=0.0,
    nesterov=False`` with it, the earlier defaults.

    The defaults were chosen on convex problems (see the page *The methods*), not on networks. Where
    curvatures reach 10⁶ a run may still end above its start: standardise the features, or lower
    ``lr``.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFFullAdagrad(model.parameters(), batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    options = {**BLOCK_OPTIONS, "precond_lr": Real(), "safeguard": boolean}
    _direction = staticmethod(_direction)
    _flat = True

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
        max_update: float | None = None,
        safeguard: bool = True,
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

    def _checked_options(self, group: Group) -> dict[str, Any]:
        values = super()._checked_options(group)
        if values["precond_lr"] * values["gamma"] >= 1:
            raise ValueError(
                f"precond_lr must be below 1/gamma = {1 / values['gamma']:g}, "
                f"got {values['precond_lr']!r}"
            )
        return values

    def _block_state(self, p: Tensor, tile: Tile, structures: Structures, group: Group) -> State:
        (dense,) = structures
        # S is kept beside its inverse, unless the inverse can be updated alone: by rank one.
        singular = _outlives_precision(group, dense.d)
        rank_one = damping(group) == 0 and self._curvature is None and not singular
        names = ("inverse",) if rank_one else ("inverse", "factor")
        # Forgetting by rank one amplifies rounding: fp32 loses definiteness within 400 steps.
        forgets = singular or (rank_one and group["gamma"] > 0)
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
        damped = any(damping(group) > 0 for group in self.param_groups if self._of(group) is self)
        kept = (key for row in self.state.values() for key in row)
        if not damped and not any(key.endswith(".factor") for key in kept):
            return super()._why_not_recordable()
        return "with damping it factorises with Cholesky, which waits for the device"
