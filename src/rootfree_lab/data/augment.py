"""Random crop and flip of a whole batch at once, and its normalisation.

Layout: `x` (n, H, W, C) uint8 with `top`, `left` (n,) the corner of each crop in the padded image,
0 to 2 padding, and `flip` (n,) boolean.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def crop_and_flip(x: Tensor, top: Tensor, left: Tensor, flip: Tensor, *, padding: int) -> Tensor:
    """Pad with black, cut each image's window out, mirror those that are flipped."""
    count, height, width, _ = x.shape
    padded = pad(x, (0, 0, padding, padding, padding, padding))
    rows = top[:, None] + torch.arange(height, device=x.device)
    across = torch.arange(width, device=x.device)
    # A mirrored window is the same window read from its right end.
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - across, across)
    image = torch.arange(count, device=x.device)
    return padded[image[:, None, None], rows[:, :, None], columns[:, None, :]]


def normalise(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Bytes (n, H, W, C) to float32 (n, C, H, W): `(x / 255 - mean) / std` per channel."""
    scale = 1 / (255 * std)
    return (x.float() * scale - mean / std).permute(0, 3, 1, 2).contiguous()
