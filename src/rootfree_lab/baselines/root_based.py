"""Shampoo and full-matrix AdaGrad as they were published: with the root."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rootfree_lab.baselines.roots import (
    apply_on_axes,
    block_slices,
    gram,
    inverse_root,
    merged_shape,
)

Group = dict[str, Any]


class Shampoo(Optimizer):
    r"""Shampoo with the root (Gupta et al. 2018), for tensors with any number of axes N.

    .. code-block:: text

        Ŝₙ <- (1 - β₂γ)Ŝₙ + β₂ G₍ₙ₎G₍ₙ₎ᵀ                      every T steps; Ŝₙ starts at 0
        U  = G with (Ŝₙ + λI)^{-1/(2N)} applied on every axis n    (Ŝ_C^{-1/4} G Ŝ_K^{-1/4})
        m  <- α₁ m + U + κ p;   p <- p - β₁ m

    No grafting. With ``bias_correction`` the average is divided by the weight it has gathered, as
    in Adam and as in the implementation that the paper compares with. There is no batch size: that
    is one of the things root-free methods add. The defaults were not tuned.

    Args:
        params: parameters, named parameters or groups.
        lr: β₁.
        precond_lr: β₂, weight of the new outer product.
        momentum: α₁, heavy ball without dampening.
        damping: λ, added to the eigenvalues before the root.
        weight_decay: κ, added to the direction after preconditioning.
        gamma: γ, 1 averages, 0 sums.
        update_every: T.
        block_size: longer axes are cut into blocks, and input axes merged up to this size; None:
            neither.
        bias_correction: whether averages are corrected for their start at zero.
        hold_stale: whether the direction between refreshes is no longer than the one at the last
            refresh. A gradient has parts in directions that none before it had; until the next
            refresh these are scaled up by up to λ^{-1/2}, 30,000 for the default, and one such
            step ends a run. (Other implementations graft the length of another method's step.)
        max_update_rms: cap on the direction's RMS per parameter, as in the root-free methods; None:
            no cap.
        root_dtype: "float32" or "float64", of the eigendecomposition.

    Example:
        >>> import torch
        >>> from rootfree_lab.baselines import Shampoo
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = Shampoo(model.parameters(), lr=1e-2)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,  # β₁
        *,
        precond_lr: float = 0.05,  # β₂
        momentum: float = 0.9,  # α₁
        damping: float = 1e-9,  # λ
        weight_decay: float = 0.0,  # κ
        gamma: float = 1.0,  # γ
        update_every: int = 2,  # T
        block_size: int | None = 1024,
        bias_correction: bool = True,
        hold_stale: bool = True,
        max_update_rms: float | None = 1.0,
        root_dtype: str = "float32",
    ) -> None:
        arguments = locals().items()
        options = {k: v for k, v in arguments if k not in ("self", "params", "__class__")}
        _check(options)
        super().__init__(params, options)

    def _axes(self, p: Tensor, group: Group) -> tuple[int, ...]:
        """The shape in which the parameter gets its factors."""
        return merged_shape(tuple(p.shape), group["block_size"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is made at once."""
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            axes = self._axes(p, group)
            state: dict[str, Tensor] = {
                "step": torch.tensor(0.0),
                "refreshed_rms": torch.zeros((), dtype=_dtype(p), device=p.device),
            }
            if group["momentum"] > 0:
                state["momentum"] = torch.zeros_like(p)
            for b, block in enumerate(block_slices(axes, group["block_size"])):
                for n, piece in enumerate(block):
                    d = piece.stop - piece.start
                    state[f"factor{b}.{n}"] = p.new_zeros(d, d, dtype=_dtype(p))
                    state[f"root{b}.{n}"] = p.new_zeros(d, d, dtype=_dtype(p))
            self.state[p] = state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel() > 0:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, g: Tensor, group: Group) -> None:
        state = self.state[p]
        step = int(state["step"].item())
        state["step"] += 1
        axes = self._axes(p, group)
        G = g.to(_dtype(p)).reshape(axes)
        U = torch.empty_like(G)
        refreshes = step % group["update_every"] == 0
        for b, block in enumerate(block_slices(axes, group["block_size"])):
            part = G[block]
            if refreshes:
                self._refresh(state, b, part, group, refreshes=step // group["update_every"] + 1)
            U[block] = apply_on_axes(part, [state[f"root{b}.{n}"] for n in range(part.dim())])
        rms = U.square().mean().sqrt().clamp(min=torch.finfo(U.dtype).tiny)
        if refreshes:
            state["refreshed_rms"].copy_(rms)
        elif group["hold_stale"]:
            # U <- U min(1, rms(U at the refresh)/rms(U))
            U *= (state["refreshed_rms"] / rms).clamp(max=1.0)
            rms = torch.minimum(rms, state["refreshed_rms"])
        if group["max_update_rms"] is not None:
            # U <- U min(1, c/rms(U))
            U *= (group["max_update_rms"] / rms).clamp(max=1.0)
        # m <- α₁ m + U + κ p;  p <- p - β₁ m
        U = U.reshape(p.shape).to(p.dtype).add_(p, alpha=group["weight_decay"])
        if "momentum" in state:
            U = state["momentum"].mul_(group["momentum"]).add_(U)
        p.add_(U, alpha=-group["lr"])

    def _refresh(
        self, state: dict[str, Tensor], b: int, G: Tensor, group: Group, *, refreshes: int
    ) -> None:
        beta2, gamma = group["precond_lr"], group["gamma"]
        keep = 1 - beta2 * gamma
        # The weights of the gradients so far sum to 1 - (1-β₂γ)ᵗ (over γ), as in Adam.
        bias = 1 - keep**refreshes if group["bias_correction"] and gamma > 0 else 1.0
        for n in range(G.dim()):
            # Ŝₙ <- (1 - β₂γ) Ŝₙ + β₂ G₍ₙ₎G₍ₙ₎ᵀ
            S = state[f"factor{b}.{n}"].mul_(keep).add_(gram(G, n), alpha=beta2)
            root = inverse_root(
                S / bias,
                2 * G.dim(),
                damping=group["damping"],
                dtype=getattr(torch, group["root_dtype"]),
            )
            state[f"root{b}.{n}"].copy_(root)


class FullAdagrad(Shampoo):
    r"""Full-matrix AdaGrad with the root (Duchi et al. 2011); with ``gamma=1``, RMSProp.

    .. code-block:: text

        Ŝ <- (1 - β₂γ)Ŝ + β₂ ggᵀ;   U = (Ŝ + λI)^{-1/2} g;   m <- α₁ m + U + κ p;   p <- p - β₁ m

    It is Shampoo of the parameter as one long vector; the arguments are :class:`Shampoo`'s. Longer
    parameters than ``block_size`` are cut into blocks.

    Example:
        >>> import torch
        >>> from rootfree_lab.baselines import FullAdagrad
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = FullAdagrad(model.parameters(), lr=0.1)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    __init__ = partialmethod(  # type: ignore[assignment]
        Shampoo.__init__, lr=0.1, precond_lr=1.0, momentum=0.0, gamma=0.0, update_every=1
    )

    def _axes(self, p: Tensor, group: Group) -> tuple[int, ...]:
        return (p.numel(),)


#: option -> (upper end, whether it is excluded); all start at zero
_RANGES = {
    "lr": (math.inf, True),
    "precond_lr": (math.inf, True),
    "momentum": (1.0, True),
    "damping": (math.inf, True),
    "weight_decay": (math.inf, True),
    "gamma": (1.0, False),
}


def _check(options: Group) -> None:
    for name, (high, is_open) in _RANGES.items():
        value = options[name]
        if not (0 <= value < high or (value == high and not is_open)):
            raise ValueError(
                f"{name} must be in [0, {high}{')' if is_open else ']'}, got {value!r}"
            )
    if options["precond_lr"] * options["gamma"] > 1:
        raise ValueError(f"precond_lr·gamma must be at most 1, got {options['precond_lr']!r}")
    cap = options["max_update_rms"]
    if cap is not None and not cap > 0:
        raise ValueError(f"max_update_rms must be in (0, inf) or None, got {cap!r}")
    for name in ("update_every", "block_size"):
        value = options[name]
        if not (isinstance(value, int) and value >= 1) and not (
            value is None and name == "block_size"
        ):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if options["root_dtype"] not in ("float32", "float64"):
        raise ValueError(
            f"root_dtype must be 'float32' or 'float64', got {options['root_dtype']!r}"
        )


def _dtype(p: Tensor) -> torch.dtype:
    """Factors are never in half precision: their roots could not be taken."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32
