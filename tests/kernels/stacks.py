"""Parameters in buckets, as an optimizer would have them, and the tail by the rule."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices import normal
from rootfree.kernels.plan import Plan
from rootfree.kernels.rounding import widened
from rootfree.layout.buckets import Bucket, Slot
from rootfree.layout.joint import JointPairs
from rootfree.layout.structured import structured_tiles
from rootfree.rules.momentum import Tail, descend_

RATES = (8.0, 0.1, 0.01, 1.0)  # of factors: B, β₂, λ, γ; tails do not read them
PLAIN = Tail(lr=0.1, alpha1=0.9, kappa=0.0, nesterov=False, decoupled=False)


def parameters(shapes, dtype=torch.float32) -> list[Tensor]:
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def gradients(ps, dtype=None) -> list[Tensor]:
    return [normal(*p.shape, seed=100 + i, dtype=dtype or p.dtype) for i, p in enumerate(ps)]


def buckets_of(
    ps: list[Tensor], dtype: torch.dtype, *, block_size: int = 16, pairs: JointPairs | None = None
) -> list[Bucket]:
    """Dense blocks; gradients are gathered in `dtype`. They have no state."""
    pairs = pairs or JointPairs()
    plan = Plan(dtype, True, False, lambda *_: None, None)
    buckets: dict = {}
    for p in ps:
        if pairs.owner(p) is not p:
            continue
        tiles = structured_tiles(pairs.shape_of(p), structure="dense", block_size=block_size)
        for i, (tile, structures) in enumerate(tiles):
            bucket = buckets.setdefault(tile.sizes, Bucket(structures, plan))
            bucket.slots.append(Slot(p, tile, f"block{i}.", pairs.pieces_of(p, tile)))
    return list(buckets.values())


def by_rule(ps, ms, counters, us, tail: Tail) -> list[Tensor]:
    """Parameters after the tail, computed in fp32 and rounded once, as in the kernel.

    Changes ms and counters.
    """
    updated = [p.float() for p in ps]
    with widened(ms, torch.float32, counters) as wide:
        descend_(updated, wide, us, tail)
    return [u.to(p.dtype) for u, p in zip(updated, ps, strict=True)]
