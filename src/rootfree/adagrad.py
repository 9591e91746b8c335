"""RF-AdaGrad: AdaGrad without the square root."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import Curvature
from rootfree.optimizer import Group, RootFreeOptimizer
from rootfree.options import BASIC_OPTIONS, Real
from rootfree.rmsprop import rf_state, rf_update_

_OPTIONS = ("lr", "batch_size", "precond_lr", "momentum", "damping", "weight_decay", "state_dtype")


class RFAdagrad(RootFreeOptimizer):
    r"""RF-AdaGrad, the diagonal root-free method that sums (γ = 0).

    .. code-block:: text

        s <- s + β₂ B g²
        m <- α₁ m + g/(s + λ) + κ p
        p <- p - β₁ m                     s starts at 1, m at 0

    The preconditioner only grows, so the steps shrink by themselves, as 1/t: made for convex
    problems and sparse features. The arguments are those of :class:`rootfree.RFRMSprop`;
    ``precond_lr`` (β₂) may be any non-negative number here, since nothing is averaged.

    The defaults are the best of a grid over both problems that :class:`rootfree.RFRMSprop` names
    (49.7 % test error on the CNN, loss 2.40 on the transformer): it trains them, but for networks
    the methods that average are the better choice.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFAdagrad(model.parameters(), lr=0.5, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    _kernel_name = "heavy_ball"
    options = {**{name: BASIC_OPTIONS[name] for name in _OPTIONS}, "precond_lr": Real()}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-1,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 1e-1,  # β₂
        momentum: float = 0.0,  # α₁
        damping: float = 1e-4,  # λ
        weight_decay: float = 0.0,  # κ
        state_dtype: torch.dtype | None = None,
        curvature: Curvature | None = None,  # H
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name in _OPTIONS}
        super().__init__(params, defaults, curvature=curvature, fused=fused, capturable=capturable)

    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return rf_state(p, group, salt=len(self.state))

    def _update(self, group: Group, ps: list[Tensor], gs: list[Tensor]) -> None:
        rf_update_(self, group, ps, gs, gamma=0.0)

    def _describe(self, p: Tensor, group: Group) -> str:
        return "diagonal"
