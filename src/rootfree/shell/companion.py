"""AdamW for groups with `companion="adamw"`, inside an optimizer of matrices.

Embeddings, heads and vectors are often better left to AdamW. This is torch's own implementation: a
group gets bit for bit the updates of torch.optim.AdamW, and shares one step, one checkpoint, one
scheduler and one scaler with the matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.adamw import adamw

from rootfree.kernels.finite import unchanged_if
from rootfree.rules.momentum import Tail
from rootfree.shell.checks import OneOf, Real, averaging_pair, boolean, learning_rate
from rootfree.shell.inspection import Factor, diagonal_factors, update_rms
from rootfree.shell.method import Method
from rootfree.shell.work import Group, Work

companion_name = OneOf((None, "adamw"))


@dataclass(frozen=True)
class AdamW(Method):
    """The method of groups that an optimizer of matrices leaves to AdamW."""

    fused: bool  #: whether torch's fused kernels may run on CUDA

    options = {
        "companion": companion_name,
        "lr": learning_rate,
        "betas": averaging_pair,
        "eps": Real(),
        "weight_decay": Real(),
        "maximize": boolean,
    }
    #: Those of torch.optim.AdamW, so that a group means the same in both, whatever step size the
    #: matrices have. weight_decay is the optimizer's, unless the group has its own.
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}

    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        # As in torch, in the dtype of p. Steps are counted where they are read: on CUDA by the
        # device, so that the host never waits and CUDA graphs work.
        where = p.device if p.is_cuda else "cpu"
        averages = {name: torch.zeros_like(p).detach() for name in ("exp_avg", "exp_avg_sq")}
        return {**averages, "step": torch.zeros((), dtype=torch.float32, device=where)}

    def _describe(self, p: Tensor, group: Group) -> str:
        return "AdamW"

    def _factors(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> list[Factor]:
        v = row["exp_avg_sq"]
        return diagonal_factors("exp_avg_sq", v.sqrt() + group["eps"], v.dtype)

    def _update_rms(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> Tensor | None:
        if p.numel() == 0:
            return None
        (b1, b2), steps = group["betas"], row["step"].clamp(min=1)  # before the first, m is zero
        m = row["exp_avg"] / (1 - b1**steps)
        v = row["exp_avg_sq"] / (1 - b2**steps)
        step = m / (v.sqrt() + group["eps"])
        tail = Tail(group["lr"], b1, 0.0, nesterov=False, decoupled=True)
        return update_rms(tail, p, step, None)

    def _update(self, work: Work) -> None:
        """One step of AdamW for the work's parameters."""
        group, lr = work.group, work.group["lr"]
        averages = [row["exp_avg"] for row in work.rows]
        on_cuda, fake = work.ps[0].is_cuda, isinstance(work.ps[0], FakeTensor)
        pairs = zip(work.ps, averages, strict=True)
        # The fused kernels need one layout for all, which averages have unless p has gaps.
        fused = on_cuda and self.fused and all(p.stride() == m.stride() for p, m in pairs)
        # torch's fused kernels skip the step themselves.
        changed = [t for row in work.rows for t in (row["exp_avg"], row["exp_avg_sq"], row["step"])]
        skip = None if fused else work.skip
        with nullcontext() if skip is None else unchanged_if(skip, [*work.ps, *changed]):
            adamw(
                work.ps,
                [_like(m, g) for m, g in zip(averages, work.gs, strict=True)],
                averages,
                [row["exp_avg_sq"] for row in work.rows],
                [],
                [row["step"] for row in work.rows],
                # torch has no foreach implementation for lr tensors that are read on the host.
                foreach=not fused and (on_cuda or not isinstance(lr, Tensor)),
                # Fake tensors, to estimate memory, have no step count that the host could read.
                fused=fused or fake,
                capturable=on_cuda,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=lr.view(()) if isinstance(lr, Tensor) else lr,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,  # the gradients have the sign already
                found_inf=work.skip if fused else None,
            )


def _like(m: Tensor, g: Tensor) -> Tensor:
    """The gradient in the dtype and layout of the averages."""
    if g.dtype == m.dtype and g.stride() == m.stride():
        return g
    return torch.empty_like(m).copy_(g)


def check_companion(given: Group, options: Mapping[str, Any], *, method: str, taken: bool) -> None:
    """Refuse a companion in a method without companions, and options that AdamW does not have.

    `options`: of the method; `taken`: whether it has companions.
    """
    companion = companion_name("companion", given.get("companion"))
    if companion is None:
        return
    if not taken:
        raise ValueError(
            f"companion must be None in {method}, got {companion!r}: a diagonal method takes every "
            "parameter itself (rootfree.parameter_groups(model, companion=None) makes its groups)"
        )
    for name in given:
        if name in options and name not in AdamW.options:
            allowed = ", ".join(option for option in AdamW.options if option != "companion")
            raise ValueError(
                f"{name} must not be given in a group with companion={companion!r}, got "
                f"{given[name]!r}: it is an option of {method}; AdamW has {allowed}"
            )
