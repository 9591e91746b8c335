"""RF-AdaGrad: AdaGrad without the square root."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.diagonal import add_momentum, diagonal_state, rf_update_
from rootfree.optimizer import Group, RootFreeOptimizer
from rootfree.options import BASIC_OPTIONS, Real

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

    DEFAULTS_NOTE

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFAdagrad(model.parameters(), lr=0.5, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    options = {**{name: BASIC_OPTIONS[name] for name in _OPTIONS}, "precond_lr": Real()}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-1,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 1.0,  # β₂
        momentum: float = 0.0,  # α₁
        damping: float = 1e-4,  # λ
        weight_decay: float = 0.0,  # κ
        state_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name in _OPTIONS}
        super().__init__(params, defaults)

    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return diagonal_state(
            p, dtype=group["state_dtype"], momentum=group["momentum"] > 0, salt=len(self.state)
        )

    def _update(self, group: Group, ps: Any, gs: Any, state: Any) -> None:
        if group["momentum"] > 0 and "momentum" not in state:  # a scheduler turned it on
            state["momentum"] = add_momentum(group["params"], ps, self.state)
        rf_update_(group, ps, gs, state, gamma=0.0)

    def _describe(self, p: Tensor, group: Group) -> str:
        return "diagonal"
