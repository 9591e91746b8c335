"""The numbers of `optimizer.diagnostics()`, computed on the device; nothing waits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from rootfree.kernels.halves import joined
from rootfree.kernels.stack import Stack
from rootfree.placement.local import is_sharded, local, local_row
from rootfree.rules.momentum import Tail, cap_rms_, clip_
from rootfree.shell.diagnostics import FactorDiagnostics, ParameterDiagnostics
from rootfree.shell.gradients import memory_of
from rootfree.shell.parameter_state import working_dtype
from rootfree.shell.summary import named_groups
from rootfree.shell.work import Group
from rootfree.structures import Dense, Diagonal, Structure, frobenius_norm
from rootfree.structures.base import wide_dtype
from rootfree.structures.conditions import condition, unit_diagonal

if TYPE_CHECKING:
    from rootfree.shell.block_optimizer import BlockOptimizer
    from rootfree.shell.optimizer import RootFreeOptimizer

Row = Mapping[str, Tensor]


class Factor(NamedTuple):
    """A factor of a preconditioner as the state has it: (b, *packed_shape), b blocks."""

    name: str
    structure: Structure
    tensor: Tensor
    limit: float
    is_matrix: bool = False  # S or S⁻¹ itself, which the rules scale to a unit diagonal


def factor_limit(kept: torch.dtype, products: torch.dtype, *, beta2: float) -> float:
    """The condition of K at which rounding determines its smallest singular values.

    K is stored with an error of eps·‖K‖. Its change, of size β₂‖K‖ at most, has the relative error
    eps of the products. K stays invertible all the same: KKᵀ loses accuracy, not definiteness.
    """
    return 1 / max(torch.finfo(kept).eps, beta2 * torch.finfo(products).eps)


def matrix_limit(dtype: torch.dtype) -> float:
    """A tenth of the condition at which S or S⁻¹, rounded, need not be positive definite."""
    return 0.1 / torch.finfo(dtype).eps


def diagonal_factors(name: str, d: Tensor, kept: torch.dtype) -> list[Factor]:
    """A diagonal preconditioner stored in a dtype; none if there are no elements.

    Elements do not mix, so the limit is the ratio of two numbers whose squares are not both in
    range.
    """
    if d.numel() == 0:
        return []
    limit = math.sqrt(torch.finfo(kept).max)
    return [Factor(name, Diagonal(d.numel()), d.reshape(1, -1), limit)]


def measured_parameters(
    optimizer: RootFreeOptimizer, *, conditions: bool
) -> list[ParameterDiagnostics]:
    """All parameters, with tensors on their devices in place of numbers."""
    return [
        _measured(optimizer, str(name), p, group, conditions=conditions)
        for group, names in named_groups(optimizer.param_groups)
        for name, p in zip(names, group["params"], strict=True)
    ]


def _measured(
    optimizer: RootFreeOptimizer, name: str, p: Tensor, group: Group, *, conditions: bool
) -> ParameterDiagnostics:
    method = optimizer._of(group)
    # Without an entry in the state, the parameter will start anew.
    row = joined(local_row(optimizer.state.get(p) or method._init_state(p, group)))
    here, g, m = local(p), p.grad, row.get("momentum", row.get("exp_avg"))
    if g is not None and is_sharded(g) and g.placements != p.placements:  # type: ignore[attr-defined]
        g = None  # its local part would take communication
    norm, update = norm_of(here), method._update_rms(p, group, row)
    rms = norm / math.sqrt(max(here.numel(), 1))
    factors = [each for each in method._factors(p, group, row) if len(each.tensor) > 0]
    numbers: dict[str, Any] = {
        "parameter_norm": norm,
        "gradient_norm": None if g is None else norm_of(g),
        "momentum_norm": None if m is None else norm_of(m),
        "update_ratio": None if update is None else torch.where(rms == 0, torch.inf, update / rms),
        "steps": row["step"].to(torch.int64, copy=True) if "step" in row else None,
    }
    return ParameterDiagnostics(
        name=name,
        shape=tuple(here.shape),
        update_every=group.get("update_every"),
        factors=tuple(_measured_factor(each, conditions) for each in factors),
        **numbers,
    )


def _measured_factor(factor: Factor, conditions: bool) -> FactorDiagnostics:
    structure, K = factor.structure, factor.tensor
    norm: Any = norm_of(frobenius_norm(structure, K.to(wide_dtype(K.dtype))))
    found: Any = None
    if conditions:
        found = condition(structure, unit_diagonal(K) if factor.is_matrix else K).amax()
    text = f"{structure.name} {structure.d}"
    return FactorDiagnostics(factor.name, text, K.dtype, norm, found, factor.limit)


def norm_of(t: Tensor) -> Tensor:
    """The norm of the local part of a tensor, in float64, where squares do not overflow."""
    norm: Tensor = torch.linalg.vector_norm(local(t).detach(), dtype=torch.float64)
    return norm


def last_update_rms(
    optimizer: RootFreeOptimizer, p: Tensor, group: Group, row: Row
) -> Tensor | None:
    """RMS of the last step of `p`; None: it is not known."""
    i = next(i for i, each in enumerate(group["params"]) if each is p)
    tail = optimizer._tail(optimizer._settings(group, i, ago=1))
    m, u = row.get("momentum"), None
    if p.grad is not None and (m is None or tail.nesterov):
        u = optimizer._direction_of(p, group, row)
    return update_rms(tail, p, m, u)


def update_rms(tail: Tail, p: Tensor, m: Tensor | None, u: Tensor | None) -> Tensor | None:
    """RMS of the step of `p`: m, u + α₁m where both are given, u without m; None without either."""
    if u is not None:
        if tail.cap is not None:
            cap_rms_([u], cap=tail.cap)
        if tail.clip is not None:
            clip_([u], c=tail.clip)
        u = u.add(p, alpha=tail.coupled)
        m = u if m is None else u.add(m, alpha=tail.alpha1)
    if m is None or local(m).numel() == 0:
        return None
    rms = norm_of(m) / math.sqrt(local(m).numel())
    # p <- p - β₁·step·(r/rms(step))
    return tail.lr * (rms if tail.rms is None else tail.rms * rms / rms.clamp(min=tail.least))


def factors_of(optimizer: BlockOptimizer, p: Tensor, group: Group, row: Row) -> list[Factor]:
    """The factors of all tiles of `p` on this rank, given its state.

    They are K; or S if an inverse is stored beside it; or S⁻¹ if only that is stored.
    """
    found = []
    half = group.get("matmul_dtype") == torch.float16
    for prefix, _, structures in optimizer._placing.cut_here(p, optimizer._cut(p, group)):
        products = torch.float16 if half else optimizer._products(p, structures, group)
        inverted = any(key.startswith(f"{prefix}inverse") for key in row)
        for n, structure in enumerate(structures):
            kinds = (f"factor{n}", "factor", f"inverse{n}", "inverse")
            key = next(prefix + kind for kind in kinds if prefix + kind in row)
            kept = row[key].dtype
            if inverted:
                found.append(Factor(key, Dense(structure.d), row[key], matrix_limit(kept), True))
            else:
                limit = factor_limit(kept, products, beta2=optimizer._rate(group))
                found.append(Factor(key, structure, row[key], limit))
    return found


def direction_of(optimizer: BlockOptimizer, p: Tensor, group: Group, row: Row) -> Tensor | None:
    """The preconditioned gradient of `p`, before any limit; None: not available."""
    joint = optimizer._pairs.owner(p) is not p or optimizer._pairs.is_weight(p)
    if joint or p in optimizer._placing.homes or p.numel() == 0:
        return None  # it depends on another gradient, or is on other ranks
    stack = Stack([p], memory_of(optimizer, group).buckets, wide=working_dtype(p))
    stack.gather_([cast("Tensor", p.grad)], squares=False)
    for part in stack.parts():
        bucket = part.share.bucket
        U = bucket.plan.direction(group, bucket.structures, joined(part.state), part.G, None)
        part.G.copy_(U)
        stack.keep_(part, refresh=False)
    return stack.directions[0].neg_() if group["maximize"] else stack.directions[0]
