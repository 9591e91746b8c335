"""RF-RMSProp: RMSProp without the square root."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import Curvature
from rootfree.methods.diagonal import DiagonalOptimizer
from rootfree.shell.options import HEAVY_BALL_OPTIONS, START_OPTIONS


class RFRMSprop(DiagonalOptimizer):
    r"""RF-RMSProp, the diagonal root-free method (γ = 1).

    .. code-block:: text

        s <- (1 - β₂) s + β₂ B g²
        m <- α₁ m + g/(s + λ) + κ p
        p <- p - β₁ m                     s starts at 1, m at 0

    Unlike ``torch.optim.RMSprop`` it has no root, and its preconditioner starts at one. The batch
    size B makes B·g² the curvature of an averaged loss, so that the steps do not depend on how the
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
        weight_decay: κ.
        nesterov: the step is g/(s + λ) + κp + α₁m in place of m.
        decoupled_weight_decay: False: κp enters the momentum. True: p <- (1 - β₁κ)p.
        max_update: c, a limit on each element of g/(s + λ), before momentum: no element of p moves
            by more than β₁c/(1 - α₁) in a step. With it, g², or the given curvature, counts at most
            as much as adds 1,000(s + 1) to s: an outlier does not stop an element for long. None:
            no limits, as in the paper.
        fast_start: β₂ is max(β₂, 5/(t + 6)) at step t (from 0). s then forgets its start s = 1
            within some twenty steps, and not within hundreds, which makes short trainings faster.
            With β₂ = 0, s stays as it is. False: β₂ throughout, as in the paper.
        state_dtype: dtype of s and m. None: float32, for float64 parameters float64.
            ``torch.bfloat16`` halves the state and rounds it stochastically.
        curvature: where H comes from, a :class:`rootfree.Curvature`; diag(H) takes the place of
            B·g². It is not part of the checkpoint.
        fused: None: one fused pass over all parameters on a GPU with Triton, torch's multi-tensor
            functions elsewhere. True requires the fused pass, False disables it.
        capturable: keep ``lr`` as a tensor on the parameters' device. Schedulers change it in
            place, and recorded CUDA graphs (:class:`rootfree.GraphedStep`) see the change.
        maximize: turn the sign of the gradients: the objective grows. A group may have its own.
        foreach: None or True, for code that passes it to every optimizer: parameters are always
            updated many at a time.
        differentiable: False, for the same code: a step cannot be differentiated.
        nonfinite: what a step does if any gradient has a NaN or an infinite number. "skip": it
            changes nothing and counts in ``optimizer.skipped_steps``; on a GPU the device decides,
            and the host does not wait. "raise": it changes nothing and raises FloatingPointError.
            "propagate": it does not look.

    With ``nesterov=False, max_update=None, fast_start=False`` this is the paper's method. The table
    *first try* on the page *Which optimizer, which settings* shows what the defaults do.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFRMSprop(model.parameters(), lr=1e-2, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    options = {**HEAVY_BALL_OPTIONS, **START_OPTIONS}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 2e-2,  # β₂
        momentum: float = 0.9,  # α₁
        damping: float = 1e-3,  # λ
        weight_decay: float = 0.0,  # κ
        nesterov: bool = True,
        decoupled_weight_decay: bool = False,
        max_update: float | None = 0.03,
        fast_start: bool = True,
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
