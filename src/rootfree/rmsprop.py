"""RF-RMSProp: RMSProp without the square root."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.diagonal import add_momentum, diagonal_state, rf_update_
from rootfree.optimizer import Group, RootFreeOptimizer
from rootfree.options import BASIC_OPTIONS

_OPTIONS = ("lr", "batch_size", "precond_lr", "momentum", "damping", "weight_decay", "state_dtype")


class RFRMSprop(RootFreeOptimizer):
    r"""RF-RMSProp, the diagonal root-free method (γ = 1).

    .. code-block:: text

        s <- (1 - β₂) s + β₂ B g²
        m <- α₁ m + g/(s + λ) + κ p
        p <- p - β₁ m                     s starts at 1, m at 0

    Against ``torch.optim.RMSprop`` there is no root, the preconditioner starts at one, and B, the
    batch size, makes B·g² the curvature of an averaged loss: the steps do not depend on how the
    loss or the parameters are scaled.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer.
        lr: β₁, step size of the parameters (a number or a one-element tensor).
        batch_size: B, the number of loss terms that the loss averages: images in the batch, tokens
            for a language model, the global number under data parallelism and gradient
            accumulation; 1 for a summed loss. Has no default: set it here, by the property
            ``optimizer.batch_size``, or with :func:`rootfree.track_batch_size`.
        precond_lr: β₂, weight of the new squared gradient.
        momentum: α₁, heavy-ball momentum on the direction, without dampening.
        damping: λ, added to the curvature: no direction is scaled up by more than 1/λ.
        weight_decay: κ, κ·p is added to the direction after preconditioning.
        state_dtype: dtype of s and m. None: float32, for float64 parameters float64.
            ``torch.bfloat16`` halves the state and rounds it stochastically.

    DEFAULTS_NOTE

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFRMSprop(model.parameters(), lr=1e-2, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    options = {name: BASIC_OPTIONS[name] for name in _OPTIONS}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 1e-2,  # β₂
        momentum: float = 0.9,  # α₁
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
        rf_update_(group, ps, gs, state, gamma=1.0)

    def _describe(self, p: Tensor, group: Group) -> str:
        return "diagonal"
