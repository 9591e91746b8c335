"""RF-AdaGrad: AdaGrad without the square root."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import Curvature
from rootfree.methods.diagonal import DiagonalOptimizer
from rootfree.shell.checks import Real
from rootfree.shell.options import HEAVY_BALL_OPTIONS


class RFAdagrad(DiagonalOptimizer):
    r"""RF-AdaGrad, the diagonal root-free method that sums (γ = 0).

    .. code-block:: text

        s <- s + β₂ B g²
        m <- α₁ m + g/(s + λ) + κ p
        p <- p - β₁ m                     s starts at 1, m at 0

    The preconditioner only grows, so the steps shrink as 1/t. It is made for convex problems and
    sparse features; on networks the methods that average do better. The arguments are those of
    :class:`rootfree.RFRMSprop`; ``precond_lr`` may be any non-negative number.

    A sum forgets nothing. With ``max_update``, the default, g² counts at most as much as doubles
    s + 1: one outlier slows an element down, and does not stop it. The limit on g/(s + λ) itself is
    there for a given curvature, and for small ``precond_lr``. ``max_update=None`` is the paper's
    method.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFAdagrad(model.parameters(), lr=0.5, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    _gamma = 0.0
    options = {**HEAVY_BALL_OPTIONS, "precond_lr": Real()}

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
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        max_update: float | None = 10.0,
        state_dtype: torch.dtype | None = None,
        curvature: Curvature | None = None,  # H
        fused: bool | None = None,
        capturable: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        nonfinite: str = "skip",
    ) -> None:
        super().__init__(params, locals())
