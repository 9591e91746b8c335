"""Diagonal root-free methods: RF-RMSProp, RF-AdaGrad and RF-AdamW.

Layout: every argument in plural is a list of tensors, one entry a parameter: `ps` parameters, `gs`
gradients of the averaged loss, `ss` preconditioners, `ms` momentum. One list is one multi-tensor
call, so the number of launches does not grow with the number of parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = list[Tensor]

# With λ = 0 a preconditioner that decayed to zero would give 0/0; this keeps it 0, changes nothing
# else (it is below every other number in the sum).
TINY = torch.finfo(torch.float32).tiny


def accumulate_squares_(ss: Tensors, gs: Tensors, *, beta2: float, B: int, gamma: float) -> None:
    """s <- (1 - β₂γ) s + β₂ B g².  Changes ss."""
    torch._foreach_mul_(ss, 1 - beta2 * gamma)
    torch._foreach_addcmul_(ss, gs, gs, value=beta2 * B)


def accumulate_(ss: Tensors, hs: Tensors, *, beta2: float, gamma: float) -> None:
    """s <- (1 - β₂γ) s + β₂ h, h the diagonal of the curvature.  Changes ss."""
    torch._foreach_mul_(ss, 1 - beta2 * gamma)
    torch._foreach_add_(ss, hs, alpha=beta2)


def preconditioned_heavy_ball_(
    ps: Tensors,
    ms: Tensors,
    gs: Tensors,
    ss: Tensors,
    *,
    lr: float | Tensor,
    alpha1: float,
    lam: float,
    kappa: float,
) -> None:
    """m <- α₁ m + g/(s+λ) + κ p;  p <- p - β₁ m.  Changes ms and ps; no ms means α₁ = 0."""
    denominators = torch._foreach_add(ss, max(lam, TINY))
    if not ms:
        ms = list(torch._foreach_div(gs, denominators))
    else:
        torch._foreach_mul_(ms, alpha1)
        torch._foreach_addcdiv_(ms, gs, denominators)
    del denominators  # at most one temporary of the parameters' size at a time
    if kappa != 0:
        torch._foreach_add_(ms, ps, alpha=kappa)
    descend_(ps, ms, lr=lr)


def descend_(ps: Tensors, us: Tensors, *, lr: float | Tensor) -> None:
    """p <- p - β₁ u.  Changes ps."""
    if isinstance(lr, Tensor):
        # A tensor step size stays on its device: scaling by it needs no value on the host.
        torch._foreach_sub_(ps, torch._foreach_mul(us, lr.reshape(())))
    else:
        torch._foreach_add_(ps, us, alpha=-lr)


def decoupled_decay_(ps: Tensors, *, lr: float | Tensor, kappa: float) -> None:
    """p <- (1 - β₁κ) p.  Changes ps."""
    if kappa != 0:
        factor = 1 - lr * kappa
        torch._foreach_mul_(ps, factor.reshape(()) if isinstance(factor, Tensor) else factor)


def average_(ms: Tensors, gs: Tensors, *, alpha: float) -> None:
    """m <- α m + (1-α) g.  Changes ms."""
    torch._foreach_lerp_(ms, gs, 1 - alpha)


def preconditioned_descent_(
    ps: Tensors, ms: Tensors, ss: Tensors, *, lr: float | Tensor, lam: float
) -> None:
    """p <- p - β₁ m/(s+λ).  Changes ps."""
    denominators = torch._foreach_add(ss, max(lam, TINY))
    if isinstance(lr, Tensor):
        # Folding β₁ into the denominator keeps this at one temporary.
        torch._foreach_div_(denominators, lr.reshape(()))
        torch._foreach_addcdiv_(ps, ms, denominators, value=-1)
    else:
        torch._foreach_addcdiv_(ps, ms, denominators, value=-lr)
