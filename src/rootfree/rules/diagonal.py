"""Diagonal root-free methods: RF-RMSProp, RF-AdaGrad and RF-AdamW.

Layout: every argument in plural is a list of tensors, one entry a parameter: `ps` parameters, `gs`
gradients of the averaged loss, `ss` preconditioners, `ms` momentum. One list is one multi-tensor
call, so the number of launches does not grow with the number of parameters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rootfree.rules.momentum import Tail, descend_

Tensors = list[Tensor]
Rate = float | Tensor  # one for all, or (n,): one for each of n tensors

# The least λ: with zero, a preconditioner that decayed to zero would make 0/0 of a zero gradient.
# Beside any other number it is below rounding.
TINY = torch.finfo(torch.float32).tiny
# In one step s grows by this times s + 1 at most. An average forgets an outlier in log(GROWTH)/β₂
# steps. A sum forgets nothing, so it may no more than double.
GROWTH, GROWTH_OF_SUMS = 1e3, 1.0
# With a fast start, β₂ is max(β₂, START/(t + START + 1)) at step t.
START = 5
# The largest s, just inside the range of fp32 and bf16: from infinity it could not come back.
LARGEST = 3e38


def start_rate(steps: Tensor, beta2: float) -> Tensor:
    """max(β₂, 5/(t + 6)) at step t (from 0).

    s then forgets its start s = 1 within twenty steps. With β₂ = 0.02 alone the weight of the start
    halves every 35 steps: where the curvature is 1e-4, that takes 500.
    """
    return (START / (steps + (START + 1))).clamp_min(beta2)


def limits_of_averages(rates: Rate, *, beta2: float, c: float) -> Rate:
    """c during a fast start, infinity later: s may fall by far more in a step than an average."""
    if not isinstance(rates, Tensor):
        return c if rates > beta2 else math.inf
    return torch.full_like(rates, math.inf).masked_fill(rates > beta2, c)


def _each(rate: Rate) -> float | Tensors:
    """As multi-tensor calls take it."""
    return list(rate.unbind()) if isinstance(rate, Tensor) else rate


def reach(*, gain: Rate, gamma: float) -> Rate:
    """c/√(s + 1), where a gradient c adds as much to s as it may grow; γ = 0 sums."""
    growth = GROWTH if gamma > 0 else GROWTH_OF_SUMS
    if isinstance(gain, Tensor):
        return (growth / gain).sqrt()
    return math.sqrt(growth / gain) if gain > 0 else math.inf


def limited(gs: Tensors, ss: Tensors, *, reach: Rate) -> Tensors:
    """max(-c, min(g, c)), element by element, with c = reach·√(s + 1).

    The step g/(s + gain·g²) is largest for a smaller g than c, so an outlier still takes less than
    the largest step.
    """
    if _all_below(gs, reach=reach):
        return gs
    limits = list(torch._foreach_add(ss, 1.0))
    torch._foreach_sqrt_(limits)
    torch._foreach_mul_(limits, _each(reach))
    return _within(gs, limits)


def _all_below(gs: Tensors, *, reach: Rate) -> bool:
    """Whether no gradient can reach its limit, as far as the host knows without waiting."""
    if not isinstance(reach, Tensor) and reach == math.inf:
        return True
    if torch.compiler.is_compiling() or type(gs[0]) is not Tensor or gs[0].device.type != "cpu":
        return False
    least = reach.min().item() if isinstance(reach, Tensor) else reach
    return bool(torch.stack(torch._foreach_norm(gs)).max().item() <= least)


def limited_together(
    gs: Tensors, hs: Tensors, ss: Tensors, *, reach: Rate
) -> tuple[Tensors, Tensors]:
    """(√f·g, f·h), f = min(1, reach²·(s + 1)/h): h adds at most what s may grow by.

    A batch that is unlike the others has a large h and a large g², so both are limited.
    """
    limits = list(torch._foreach_add(ss, 1.0))
    torch._foreach_mul_(limits, _each(reach**2))
    factors = list(torch._foreach_div(limits, list(torch._foreach_clamp_min(hs, TINY))))
    torch._foreach_clamp_max_(factors, 1.0)
    torch._foreach_sqrt_(factors)
    # f·h as a minimum: h may be infinite, as B·g² of a large g is.
    return list(torch._foreach_mul(gs, factors)), list(torch._foreach_minimum(hs, limits))


def largest_of(*dtypes: torch.dtype) -> float:
    """The largest s that is kept in one of these dtypes and computed in another."""
    return 1e308 if {*dtypes} == {torch.float64} else LARGEST


def accumulate_squares_(
    ss: Tensors, gs: Tensors, *, beta2: Rate, B: int, gamma: float, largest: float = LARGEST
) -> None:
    """s <- (1 - β₂γ) s + β₂ B g², at most `largest`.  Changes ss."""
    if isinstance(beta2, Tensor):
        hs = torch._foreach_mul(gs, gs)
        torch._foreach_mul_(hs, B)
        accumulate_(ss, list(hs), beta2=beta2, gamma=gamma, largest=largest)
        return
    torch._foreach_mul_(ss, 1 - beta2 * gamma)
    torch._foreach_addcmul_(ss, gs, gs, value=beta2 * B)
    torch._foreach_clamp_max_(ss, largest)


def accumulate_(
    ss: Tensors, hs: Tensors, *, beta2: Rate, gamma: float, largest: float = LARGEST
) -> None:
    """s <- (1 - β₂γ) s + β₂ h, h the diagonal of the curvature, at most `largest`.  Changes ss."""
    torch._foreach_mul_(ss, _each(1 - beta2 * gamma))
    if isinstance(beta2, Tensor):
        torch._foreach_add_(ss, torch._foreach_mul(hs, _each(beta2)))
    else:
        torch._foreach_add_(ss, hs, alpha=beta2)
    torch._foreach_clamp_max_(ss, largest)


def preconditioned_heavy_ball_(
    ps: Tensors, ms: Tensors, gs: Tensors, ss: Tensors, *, lam: float, tail: Tail
) -> None:
    """u = g/(s+λ);  m <- α₁ m + u + κ p;  p <- p - β₁ m.  Changes ms and ps (see `descend_`)."""
    descend_(ps, ms, gs, tail, over=list(torch._foreach_add(ss, max(lam, TINY))))


def average_(ms: Tensors, gs: Tensors, *, alpha: float) -> None:
    """m <- α m + (1-α) g.  Changes ms."""
    torch._foreach_lerp_(ms, gs, 1 - alpha)


def ahead(ms: Tensors, gs: Tensors, *, alpha: float) -> Tensors:
    """α m + (1-α) g: the average as if g came once more, for Nesterov's step."""
    return list(torch._foreach_lerp(gs, ms, alpha))


def limited_for_average(gs: Tensors, ss: Tensors, *, lam: float, c: Rate) -> Tensors:
    """g, each element at most c(s+λ): a gradient far beyond the others does not rule an average."""
    limits = list(torch._foreach_add(ss, max(lam, TINY)))
    torch._foreach_mul_(limits, _each(c))
    return _within(gs, limits)


def _within(gs: Tensors, limits: Tensors) -> Tensors:
    """max(-c, min(g, c)), element by element.  Changes limits."""
    within = list(torch._foreach_minimum(gs, limits))
    torch._foreach_neg_(limits)
    torch._foreach_maximum_(within, limits)
    return within


def preconditioned_descent_(
    ps: Tensors, ms: Tensors, ss: Tensors, *, lam: float, lr: float | Tensor
) -> None:
    """p <- p - β₁ m/(s+λ).  Changes ps."""
    denominators = torch._foreach_add(ss, max(lam, TINY))
    if isinstance(lr, Tensor):
        # Folding β₁ into the denominator keeps this at one temporary.
        torch._foreach_div_(denominators, lr.reshape(()))
        torch._foreach_addcdiv_(ps, ms, denominators, value=-1)
    else:
        torch._foreach_addcdiv_(ps, ms, denominators, value=-lr)
