"""What the matrix methods say of a parameter: the text of `summary()`, factors, its direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rootfree.kernels.halves import joined
from rootfree.kernels.stack import Stack
from rootfree.shell.gradients import memory_of
from rootfree.shell.inspection import Factor, block_factors, factor_limit
from rootfree.shell.parameter_state import working_dtype

if TYPE_CHECKING:
    from rootfree.shell.block_optimizer import BlockOptimizer

Group = dict[str, Any]


def description(optimizer: BlockOptimizer, p: Tensor, group: Group) -> str:
    """How many blocks `p` has, and of which factors."""
    if optimizer._pairs.owner(p) is not p:
        return "with its weight"
    parts = []
    for _, tile, structures in optimizer._cut(p, group):
        factors = " x ".join(f"{s.name} {s.d}" for s in structures)
        parts.append(f"{tile.blocks} of {factors}" if tile.blocks > 1 else factors)
    joint = " (with its bias)" if optimizer._pairs.is_weight(p) else ""
    return "; ".join(parts) + joint or "none"


def factors_of(
    optimizer: BlockOptimizer, p: Tensor, group: Group, row: Mapping[str, Tensor]
) -> list[Factor]:
    """The factors of all tiles of `p` that are here, given its state."""
    found = []
    for prefix, _, structures in optimizer._placing.cut_here(p, optimizer._cut(p, group)):
        names = (prefix + "factor", prefix + "inverse")
        kept = next(t.dtype for key, t in row.items() if key.startswith(names))
        half = group.get("matmul_dtype") == torch.float16
        products = torch.float16 if half else optimizer._products(p, structures, group)
        limit = factor_limit(kept, products, beta2=optimizer._rate(group))
        found += block_factors(row, prefix, structures, limit)
    return found


def direction_of(optimizer: BlockOptimizer, p: Tensor, group: Group) -> Tensor | None:
    """The preconditioned gradient of `p`, before any limit; None: it is not at hand."""
    joint = optimizer._pairs.owner(p) is not p or optimizer._pairs.is_weight(p)
    if joint or p in optimizer._placing.homes or p.numel() == 0:
        return None  # it is not of this gradient alone, or not here
    stack = Stack([p], memory_of(optimizer, group).buckets, wide=working_dtype(p))
    stack.gather_([cast("Tensor", p.grad)], squares=False)
    for part in stack.parts():
        bucket = part.share.bucket
        U = bucket.plan.direction(group, bucket.structures, joined(part.state), part.G, None)
        part.G.copy_(U)
        stack.keep_(part, refresh=False)
    return stack.directions[0]
