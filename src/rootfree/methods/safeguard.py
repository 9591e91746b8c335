"""What the full-matrix methods add to the paper's rule with ``safeguard=True``.

The paper's rule takes B·ggᵀ for the curvature. Where the mean of a gradient is larger than its
noise, that is far too much: S = I + β₂B·Σggᵀ grows until nothing moves, and the more so the larger
the loss, its unit and B are. Measured in a unit s, B·ggᵀ/s, S stays near I while gradients are as
large as the first, and the method begins as gradient descent with step size β₁, which S then holds
back where gradients stay large. That needs some care with the first steps:

- s starts at 1, the paper's unit, and doubles with every refresh until it is tr H of the first one.
  Until then S starts anew from I, and steps have no momentum: they grow from small ones.
- A gradient four times as long as the first ends this early: the steps have become too large for
  the problem, and s goes back by 256.
- H is limited to 1,000 s, and the direction U to β₂B/s·gᵀU <= 1, which the exact rule of S⁻¹ has
  anyway: one outlier neither moves parameters far nor stops their direction for good.
- Where tr H stays beyond 1,000 s, the block begins anew: its first gradients were not like the
  others. Whether it stays is told by a size that follows tr H by a factor of two in a refresh.
- With γ > 0 the damping is λ + γ: without gradients S goes back to I, not to zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature
from rootfree.kernels.plan import Group, State
from rootfree.structures import per_block
from rootfree.structures.base import wide_dtype

GROWTH, TOO_LARGE, BACK = 2.0, 16.0, 256.0  # of squares; noise is within a factor of 16
LARGEST = 1e3  # tr H/s
LEAST = 1e-150  # √tr H that has a square in float64


def damping(group: Group) -> float:
    """λ + γ, with which I is where S rests."""
    lam: float = group["damping"] + (group["gamma"] if group["safeguard"] else 0.0)
    return lam


def safeguard_state(blocks: int, d: int, *, dtype: torch.dtype, device: torch.device) -> State:
    """√s (0: no gradient yet), √tr H, whether s still grows, the last step meanwhile.

    √tr H is the first one while s grows, then what follows it; 0 where steps had become too large.
    """
    zero = torch.zeros(blocks, dtype=dtype, device=device)  # roots: fp32 has the range for them
    return {
        "unit": zero,
        "first": zero.clone(),
        "growing": torch.ones(blocks, dtype=torch.bool, device=device),
        "previous": torch.zeros(blocks, d, dtype=dtype, device=device),
    }


def in_unit_(state: State, H: BlockCurvature, d: int, dtype: torch.dtype) -> BlockCurvature:
    """H/s, limited, with the s of this refresh.  Changes s; S starts anew in blocks where it does.

    A block whose curvature was always zero waits; what is not finite, or has no inverse in the
    dtype of the products, is not counted.
    """
    unit, first, growing = state["unit"].double(), state["first"].double(), state["growing"]
    outgrown = ~growing & (first > math.sqrt(LARGEST) * unit)
    unit = torch.where(outgrown, 0.0, unit)
    growing |= outgrown
    root = H.root_mean_diagonal((d,)).double() * math.sqrt(d)
    counts = (root >= max(LEAST, torch.finfo(dtype).tiny)) & root.isfinite()
    fresh = counts & (unit == 0)
    largest = torch.finfo(state["first"].dtype).max
    first = torch.where(fresh, root.clamp(max=largest), first)
    large = growing & counts & (root > math.sqrt(TOO_LARGE) * first)
    moved = torch.where(large, unit / math.sqrt(BACK), unit * math.sqrt(GROWTH))
    moved = torch.where(fresh, 1.0, moved).minimum(first)
    changes = growing & counts
    unit = torch.where(changes, moved, unit)
    growing &= ~(large | (changes & (unit >= first)))
    ratio = math.sqrt(GROWTH)
    followed = root.clamp(first / ratio, (first * ratio).clamp(max=largest))
    first = torch.where(large, 0.0, torch.where(counts & ~growing, followed, first))
    state["unit"].copy_(unit)
    state["first"].copy_(first)
    for name, tensor in state.items():
        if name.startswith(("factor", "inverse", "tangent")):
            tensor.masked_fill_(per_block(changes, tensor), 0.0)
            if not name.startswith("tangent"):  # K, S and S⁻¹ alike
                tensor.diagonal(dim1=-2, dim2=-1).add_(changes.to(tensor.dtype)[:, None])
    scale = torch.where(unit > 0, 1 / unit, 0.0).minimum(math.sqrt(LARGEST) / root)
    return H.for_operands(dtype, torch.where(counts, scale, 0.0).to(dtype))


def unit_size(G: Tensor) -> tuple[Tensor, Tensor]:
    """(G/u, u) with u (b,) a power of two about as large as the largest entry of G (b, d)."""
    largest = G.abs().amax(1).to(wide_dtype(G.dtype))
    size = torch.exp2(torch.floor(torch.log2(largest.clamp(min=torch.finfo(largest.dtype).tiny))))
    return G / size.to(G.dtype)[:, None], size


def bounded(
    group: Group, state: State, G: Tensor, U: Tensor, size: Tensor, *, refresh: bool
) -> Tensor:
    """The direction of a gradient size·G with U = S⁻¹G: limited, and without momentum at first.

    Steps Δ without momentum take directions Δ - α₁·(the last Δ). Between refreshes, which alone may
    change state, the Δ of the last one stands for it.  Changes state["previous"].
    """
    unit, growing, previous = state["unit"].double(), state["growing"], state["previous"]
    wide = size.double()
    U = U.to(previous.dtype)
    slope = (G * U).sum(1).double() * wide.square()
    trusted = group["precond_lr"] * group["batch_size"] * slope / unit.square()
    factor = torch.where(unit > 0, wide / trusted.clamp(min=1.0), 0.0)
    U = U * factor.to(U.dtype)[:, None]
    direction: Tensor = U - group["momentum"] * previous
    if refresh:
        previous.copy_(torch.where(growing[:, None], U, 0.0))
    return direction
