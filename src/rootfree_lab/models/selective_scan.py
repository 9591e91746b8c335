"""The selective scan of Mamba, in plain torch.

Layout, for every function here: b batch, g groups (scan directions), d channels, n states of a
channel, L positions.  u, delta: (b, g, d, L);  A: (g, d, n);  B, C: (b, g, n, L);  D: (g, d).

    h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t u_t;   y_t = C_t h_t + D u_t;   h_0 = 0
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *, chunk: int = 8
) -> Tensor:
    """The outputs y: (b, g, d, L).

    The states (b, g, d, L, n) are n times as large as anything else here, so they are made a chunk
    of positions at a time, and again in the backward pass: only those at the chunks' ends stay.
    """
    state = u.new_zeros(*u.shape[:3], A.shape[-1])
    ys = []
    for start in range(0, u.shape[-1], chunk):
        piece = slice(start, start + chunk)
        arguments = (state, u[..., piece], delta[..., piece], A, B[..., piece], C[..., piece])
        if torch.is_grad_enabled() and u.shape[-1] > chunk:
            y, state = checkpoint(_scan_chunk, *arguments, use_reentrant=False)
        else:
            y, state = _scan_chunk(*arguments)
        ys.append(y)
    return torch.cat(ys, -1) + D[..., None] * u


def _scan_chunk(
    state: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor]:
    """C_t h_t for the positions of a chunk, and the last h; `state` is the h before the chunk."""
    decay = (delta[..., None] * A[:, :, None]).exp()  # (b, g, d, L, n), all in (0, 1]
    h = (delta * u)[..., None] * B.transpose(-1, -2)[:, :, None]
    h = torch.cat([h[..., :1, :] + decay[..., :1, :] * state[..., None, :], h[..., 1:, :]], -2)
    # Doubling: after the pass with `shift`, h_t sums the last 2·shift inputs and decay_t is the
    # product of as many decays. Only products of numbers below one appear, so nothing overflows
    # (dividing cumulative products would).
    shift = 1
    while shift < h.shape[-2]:
        h = h + decay * pad(h[..., :-shift, :], (0, 0, shift, 0))
        decay = decay * pad(decay[..., :-shift, :], (0, 0, shift, 0), value=1.0)
        shift *= 2
    return torch.einsum("bgdln,bgnl->bgdl", h, C), h[..., -1, :]
