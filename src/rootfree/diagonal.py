"""What the diagonal methods share: one number a parameter element, kept in a chosen precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rootfree.rounding import widened
from rootfree.rules.diagonal import accumulate_squares_, preconditioned_heavy_ball_

Group = dict[str, Any]
Tensors = list[Tensor]


def working_dtype(p: Tensor) -> torch.dtype:
    """The dtype in which updates of `p` are computed: float64 for float64, float32 otherwise."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def in_working_dtype(ps: Tensors, gs: Tensors) -> Tensors:
    """The gradients in the dtype of the computation; themselves where they have it already."""
    dtype = working_dtype(ps[0])
    return gs if gs[0].dtype == dtype else [g.to(dtype) for g in gs]


def diagonal_state(
    p: Tensor, *, dtype: torch.dtype | None, momentum: bool, salt: int
) -> dict[str, Tensor]:
    """s = 1 and, with momentum, m = 0, laid out like `p`.

    In bfloat16 there is also the counter that makes stochastic rounding repeatable; it starts at
    another value for every parameter (`salt`), so that no two share their noise.
    """
    dtype = dtype or working_dtype(p)
    state = {"preconditioner": torch.ones_like(p, dtype=dtype, requires_grad=False)}
    if momentum:
        state["momentum"] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
    if dtype == torch.bfloat16:
        start = salt * 0x9E3779B1 & 0x7FFFFFFF
        state["rounding"] = torch.tensor(start, dtype=torch.int32, device=p.device)
    return state


def add_momentum(
    all_ps: Tensors, ps: Tensors, states: Mapping[Tensor, dict[str, Tensor]]
) -> Tensors:
    """Give every parameter of a group a momentum buffer; returns those of `ps`."""
    for p in all_ps:
        states[p]["momentum"] = torch.zeros_like(states[p]["preconditioner"])
    return [states[p]["momentum"] for p in ps]


def rf_update_(
    group: Group, ps: Tensors, gs: Tensors, state: dict[str, Tensors], *, gamma: float
) -> None:
    """RF-RMSProp (γ = 1) and RF-AdaGrad (γ = 0).  Changes ps and state."""
    gs, dtype, counters = in_working_dtype(ps, gs), working_dtype(ps[0]), state.get("rounding")
    with widened(state["preconditioner"], dtype, counters) as ss:
        # s <- (1 - β₂γ) s + β₂ B g²
        accumulate_squares_(ss, gs, beta2=group["precond_lr"], B=group["batch_size"], gamma=gamma)
    with widened(state.get("momentum", []), dtype, counters) as ms:
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
