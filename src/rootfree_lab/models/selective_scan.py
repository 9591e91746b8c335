"""The selective scan of Mamba, in plain torch.

Layout, for every function here: b batch, g groups (scan directions), d channels, n states of a
channel, L positions.  u, delta: (b, g, d, L);  A: (g, d, n);  B, C: (b, g, n, L);  D: (g, d).

    h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t u_t;   y_t = C_t h_t + D u_t;   h_0 = 0
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *, chunk: int = 64
) -> Tensor:
    """The outputs y: (b, g, d, L).

    The states (b, g, d, L, n) are n times as large as anything else here, so they are made a chunk
    of positions at a time, and again in the backward pass (which holds some eight times the states
    of a chunk): only those at the chunks' ends stay.
    """
    state = u.new_zeros(*u.shape[:3], A.shape[-1])
    ys = []
    for u_, delta_, B_, C_ in zip(*(t.split(chunk, -1) for t in (u, delta, B, C)), strict=True):
        arguments = (state, u_, delta_, A, B_, C_)
        if torch.is_grad_enabled() and u.shape[-1] > chunk:
            y, state = checkpoint(
                _scan_chunk, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y, state = _scan_chunk(*arguments)
        ys.append(y)
    return torch.cat(ys, -1) + D[..., None] * u


def _scan_chunk(
    state: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor]:
    """C_t h_t for the positions of a chunk, and the last h; `state` is the h before the chunk.

    The chunk is cut into k runs of as many positions. All runs go through the recurrence side by
    side, each from h = 0; then the states at their ends are carried on, one run after the other.
    Only products of decays appear, none above one, so nothing overflows (quotients would).
    """
    length = u.shape[-1]
    positions = math.isqrt(length - 1) + 1  # of a run
    k = -(-length // positions)
    fill = (0, k * positions - length)  # Δ = 0: the state stays as it is
    # Position i of every run, for i = 0, 1, ...:  u, Δ: (b, g, d, k);  B, C: (b, g, 1, k, n)
    us, deltas, Bs, Cs = (
        pad(t, fill).unflatten(-1, (k, positions)).unbind(-1) for t in (u, delta, B, C)
    )
    Bs, Cs = ([t.mT[:, :, None] for t in each] for each in (Bs, Cs))
    hs: list[Tensor] = []  # (b, g, d, k, n), from h = 0 before the run
    products: list[Tensor] = []  # of the run's decays so far
    for u_, delta_, B_ in zip(us, deltas, Bs, strict=True):
        decay = (delta_[..., None] * A[:, :, None]).exp()
        h = (delta_ * u_)[..., None] * B_
        hs.append(torch.addcmul(h, decay, hs[-1]) if hs else h)
        products.append(decay * products[-1] if products else decay)
    before = []
    for h, product in zip(hs[-1].unbind(-2), products[-1].unbind(-2), strict=True):
        before.append(state)
        state = torch.addcmul(h, product, state)
    starts = torch.stack(before, -2)
    ys = [
        (torch.addcmul(h, product, starts) * C_).sum(-1)
        for h, product, C_ in zip(hs, products, Cs, strict=True)
    ]
    return torch.stack(ys, -1).flatten(-2)[..., :length], state
