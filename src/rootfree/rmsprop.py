"""RF-RMSProp: RMSProp without the square root."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import Curvature
from rootfree.optimizer import Group, RootFreeOptimizer
from rootfree.options import BASIC_OPTIONS
from rootfree.precision import add_momentum, in_working_dtype, parameter_state, working_dtype
from rootfree.rounding import widened
from rootfree.rules.diagonal import (
    accumulate_,
    accumulate_squares_,
    preconditioned_heavy_ball_,
)

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
        curvature: where H comes from, a :class:`rootfree.Curvature`; diag(H) takes the place of
            B·g². It is not part of the checkpoint.
        fused: None: one fused pass over all parameters where Triton and a GPU are there, torch's
            multi-tensor functions elsewhere. True insists on the former, False on the latter.
        capturable: keep ``lr`` as a tensor on the parameters' device, which schedulers change in
            place, so that a step recorded in a CUDA graph (:class:`rootfree.GraphedStep`) follows.

    The defaults were chosen on two problems at once, as the point of a small grid (step size,
    precond_lr, damping; one seed) that is good on both: a small CNN on 10,000 CIFAR-10 images
    (8 epochs) and a byte-level transformer with 3.3 million parameters (500 steps of 8,192 tokens).
    Untuned from there they gave 39.7 % test error and validation loss 1.63; AdamW at the best of
    three step sizes for each gave 41.3 % and 1.79. ``damping=1e-4`` suited the transformer better
    (1.54), the CNN worse (40.7 %).

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFRMSprop(model.parameters(), lr=1e-2, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    _kernel_name = "heavy_ball"
    options = {name: BASIC_OPTIONS[name] for name in _OPTIONS}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 2e-2,  # β₂
        momentum: float = 0.9,  # α₁
        damping: float = 1e-3,  # λ
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
        rf_update_(self, group, ps, gs, gamma=1.0)

    def _describe(self, p: Tensor, group: Group) -> str:
        return "diagonal"


def rf_state(p: Tensor, group: Group, *, salt: int) -> dict[str, Tensor]:
    """s = 1 and, with momentum, m = 0."""
    fill = {"preconditioner": 1.0, **({"momentum": 0.0} if group["momentum"] > 0 else {})}
    return parameter_state(p, group, fill, salt=salt)


def rf_update_(
    self: RootFreeOptimizer, group: Group, ps: list[Tensor], gs: list[Tensor], *, gamma: float
) -> None:
    """RF-RMSProp (γ = 1) and RF-AdaGrad (γ = 0).  Changes ps and their state."""
    if group["momentum"] > 0 and not self._states(ps, "momentum"):
        add_momentum(group, self.state)
    dtype, counters = working_dtype(ps[0]), self._states(ps, "rounding")
    beta2, B = group["precond_lr"], group["batch_size"]
    rates = {"keep": 1 - beta2 * gamma, "gain": beta2 * B, "alpha1": group["momentum"]}
    if self._run_kernel(group, ps, gs, **rates):
        return
    gs = in_working_dtype(ps, gs)
    hs = None if self._curvature is None else self._curvature.diagonals(ps, gs, B=B)
    with widened(self._states(ps, "preconditioner"), dtype, counters) as ss:
        if hs is None:
            # s <- (1 - β₂γ) s + β₂ B g²
            accumulate_squares_(ss, gs, beta2=beta2, B=B, gamma=gamma)
        else:
            # s <- (1 - β₂γ) s + β₂ diag(H)
            accumulate_(ss, hs, beta2=beta2, gamma=gamma)
    with widened(self._states(ps, "momentum"), dtype, counters) as ms:
        # m <- α₁ m + g/(s+λ) + κ p;  p <- p - β₁ m
        preconditioned_heavy_ball_(
            ps,
            ms,
            gs,
            ss,
            lr=group["lr"],
            alpha1=group["momentum"],
            lam=group["damping"],
            kappa=group["weight_decay"],
        )
