"""RF-AdamW: AdamW without the square root."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import Curvature
from rootfree.kernels.rounding import widened
from rootfree.methods.diagonal import DiagonalOptimizer
from rootfree.rules import diagonal as rules
from rootfree.rules.momentum import Tail, decay_
from rootfree.shell.checks import Optional, averaging_pair, boolean, positive
from rootfree.shell.inspection import update_rms
from rootfree.shell.optimizer import states
from rootfree.shell.options import BASIC_OPTIONS, START_OPTIONS
from rootfree.shell.parameter_state import in_working_dtype, parameter_state, working_dtype
from rootfree.shell.work import Group, Work


class RFAdamW(DiagonalOptimizer):
    r"""RF-AdamW: moving averages of the gradient and of its square, no root, decoupled decay.

    .. code-block:: text

        v <- b₂ v + (1 - b₂) g²
        m <- b₁ m + (1 - b₁) g            each element of g at most c(B v + λ)
        n  = b₁ m + (1 - b₁) g            Nesterov; without it n = m
        p <- p - β₁κ p - β₁ n/(B v + λ)   v starts at 1/B, m at 0; no bias correction

    The state keeps s = B·v, which starts at 1 for every B. Each squared gradient is scaled by the B
    of its own step, so B may change.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer.
        lr: β₁, step size of the parameters (a number or a one-element tensor).
        batch_size: B, the number of averaged loss terms, as in :class:`rootfree.RFRMSprop`.
        betas: (b₁, b₂), how much of the averages of the gradient and of its square is kept.
        damping: λ, added to the curvature.
        weight_decay: κ, decoupled: multiplied by the step size and the parameter only.
        nesterov: the step has n in the place of m: it answers to the new gradient at once. Where
            most gradients have become tiny, one that has not moves p by the limit c; with m alone
            p goes on for ten steps, whatever the next gradients say.
        max_update: c, a limit on each element of g/(B v + λ) before it enters the average: a batch
            unlike the others moves an element of p by about β₁c in all. None: no limit.
        fast_start: 1 - b₂ is max(1 - b₂, 5/(t + 6)) at step t (from 0), as in
            :class:`rootfree.RFRMSprop`. While it lasts v may fall by far more in a step than m, so
            the elements of m are limited like those of g. False: 1 - b₂ throughout. Then,
            and with ``max_update=None``, m has no limit.

    The other arguments are those of :class:`rootfree.RFRMSprop`. The table *first try* on the page
    *Which optimizer, which settings* shows what the defaults do.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFAdamW(model.parameters(), lr=1e-2, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
    """

    _kernel = "averaged"
    options = {
        **BASIC_OPTIONS,
        **START_OPTIONS,
        "betas": averaging_pair,
        "nesterov": boolean,
        "max_update": Optional(positive),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-1,  # β₁
        *,
        batch_size: int | None = None,  # B
        betas: tuple[float, float] = (0.9, 0.98),
        damping: float = 1e-3,  # λ
        weight_decay: float = 0.0,  # κ
        nesterov: bool = True,
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

    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        fill = {"preconditioner": 1.0, "momentum": 0.0}
        return {**parameter_state(p, group, fill, salt=len(self.state)), **self._count_of(p)}

    def _update_by_rule(self, work: Work) -> None:
        group, b1 = work.group, work.group["betas"][0]
        ps, dtype, counters = work.ps, working_dtype(work.ps[0]), states(work, "rounding")
        gs = in_working_dtype(ps, work.gs)
        lr, lam, c = group["lr"], group["damping"], group["max_update"]
        with widened(states(work, "preconditioner"), dtype, counters, work.withins) as ss:
            # s <- b₂ s + (1 - b₂) B g²   (s = B v)
            rates = self._start_rates(work, dtype)
            gs = self._accumulate_(work, ss, gs, rates)
        with widened(states(work, "momentum"), dtype, counters, work.withins) as ms:
            # m <- b₁ m + (1 - b₁) g, each element of g at most c(s + λ)
            within = gs if c is None else rules.limited_for_average(gs, ss, lam=lam, c=c)
            if c is not None and rates is not None:  # and during a fast start of m
                cs = rules.limits_of_averages(rates, beta2=self._beta2(group), c=c)
                limited = rules.limited_for_average(ms, ss, lam=lam, c=cs)
                torch._foreach_copy_(ms, limited)
            rules.average_(ms, within, alpha=b1)
            # n = b₁ m + (1 - b₁) g
            ns = rules.ahead(ms, within, alpha=b1) if group["nesterov"] else ms
        # p <- (1 - β₁κ) p - β₁ n/(s + λ)
        decay_(ps, lr=lr, kappa=group["weight_decay"])
        rules.preconditioned_descent_(ps, ns, ss, lam=lam, lr=lr)

    def _update_rms(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> Tensor | None:
        wide, tail = working_dtype(p), self._tail(group)
        step = row["momentum"].to(wide) / (row["preconditioner"].to(wide) + group["damping"])
        u = self._direction_of(p, group, row) if tail.nesterov else None
        if u is None:
            return update_rms(tail, p, step, None)
        # n/(s + λ) = (1 - b₁)(u + b₁·step/(1 - b₁))
        rest = 1 - tail.alpha1
        return update_rms(tail._replace(lr=rest * tail.lr), p, step / rest, u)

    @staticmethod
    def _beta2(group: Group) -> float:
        return cast("float", 1 - group["betas"][1])

    def _tail(self, group: Group) -> Tail:
        b1 = group["betas"][0]
        kappa, clip = group["weight_decay"], group["max_update"]
        return Tail(group["lr"], b1, kappa, group["nesterov"], decoupled=True, clip=clip)
