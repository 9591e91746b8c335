"""VMamba (Liu et al. 2024), first version: blocks around a selective scan in four directions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from rootfree_lab.data import Dataset
from rootfree_lab.models.selective_scan import selective_scan
from rootfree_lab.torchvision_shim import make_importable

_DIRECTIONS = 4


def cross_scan(x: Tensor) -> Tensor:
    """(b, d, H, W) -> (b, 4, d, H·W): along rows, along columns, and both backwards."""
    forward = torch.stack([x.flatten(2), x.transpose(2, 3).flatten(2)], 1)
    return torch.cat([forward, forward.flip(-1)], 1)


def cross_merge(y: Tensor, height: int, width: int) -> Tensor:
    """(b, 4, d, H·W) -> (b, d, H, W): every direction's outputs back at their pixels, summed."""
    rows, columns = (y[:, :2] + y[:, 2:].flip(-1)).unbind(1)
    merged: Tensor = rows.unflatten(-1, (height, width)) + columns.unflatten(
        -1, (width, height)
    ).transpose(2, 3)
    return merged


class SelectiveScan2d(nn.Module):
    """In-projection, depthwise convolution, four scans, gate, out-projection; (b, H, W, c)."""

    def __init__(self, channels: int, *, states: int, expand: int) -> None:
        super().__init__()
        d, rank = expand * channels, math.ceil(channels / 16)
        self.states, self.rank = states, rank
        self.in_proj = nn.Linear(channels, 2 * d, bias=False)
        self.conv = nn.Conv2d(d, d, 3, padding=1, groups=d)
        # One slice a direction: x -> (Δ in its low-rank form, B, C), then Δ to all channels.
        self.x_proj = nn.Parameter(torch.empty(_DIRECTIONS, rank + 2 * states, d))
        self.dt_proj = nn.Parameter(torch.empty(_DIRECTIONS, d, rank))
        self.dt_bias = nn.Parameter(torch.empty(_DIRECTIONS, d))
        # Stored as the authors do: the shape matters to a matrix method that takes all parameters.
        self.A_log = nn.Parameter(torch.empty(_DIRECTIONS * d, states))
        self.D = nn.Parameter(torch.ones(_DIRECTIONS * d))
        self.norm = nn.LayerNorm(d)
        self.out_proj = nn.Linear(d, channels, bias=False)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        nn.init.uniform_(
            self.x_proj, -(self.x_proj.shape[-1] ** -0.5), self.x_proj.shape[-1] ** -0.5
        )
        nn.init.uniform_(self.dt_proj, -(self.rank**-0.5), self.rank**-0.5)
        # softplus(bias) is log-uniform in [0.001, 0.1]: the time constants that Mamba starts from
        dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        self.A_log.copy_(
            torch.arange(1, self.states + 1, device=dt.device).log().expand_as(self.A_log)
        )

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        x, gate = self.in_proj(x).chunk(2, -1)
        x = silu(self.conv(x.permute(0, 3, 1, 2)))
        y = cross_merge(self._scan(cross_scan(x)), height, width).permute(0, 2, 3, 1)
        out: Tensor = self.out_proj(self.norm(y) * silu(gate))
        return out

    def _scan(self, x: Tensor) -> Tensor:
        # The recurrence multiplies thousands of decays near one: float32, whatever autocast says.
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            parts = torch.einsum("bgdl,gcd->bgcl", x, self.x_proj.float())
            low, B, C = parts.split([self.rank, self.states, self.states], 2)
            delta = torch.einsum("bgrl,gdr->bgdl", low, self.dt_proj.float())
            delta = softplus(delta + self.dt_bias.float()[..., None])
            A = -self.A_log.float().exp().unflatten(0, (_DIRECTIONS, -1))
            D = self.D.float().unflatten(0, (_DIRECTIONS, -1))
            return selective_scan(x, delta, A, B, C, D)


class VSSBlock(nn.Module):
    """x + scan(norm(x)); in training the scan is left out for some examples (stochastic depth)."""

    def __init__(self, channels: int, *, states: int, expand: int, drop_path: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.scan = SelectiveScan2d(channels, states=states, expand=expand)
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scan(self.norm(x))
        if self.training and self.drop_path > 0:
            kept = torch.rand(len(y), 1, 1, 1, device=y.device) >= self.drop_path
            y = y * kept / (1 - self.drop_path)
        return x + y


class VMamba(nn.Module):
    """VMamba-T: patches, stages of VSS blocks with merging between them, mean, linear head.

    Patches are 4×4 pixels, 2×2 in images of at most 64. They are merged as in Swin: 2×2 with c
    channels to one with 2c, an odd last row or column padded.
    """

    def __init__(
        self, data: Dataset, *, channels: int = 96, depths: tuple[int, ...] = (2, 2, 9, 2),
        states: int = 16, expand: int = 2, patch: int | None = None, drop_path: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        make_importable()
        from timm.models.swin_transformer import PatchMerging

        patch = patch or (2 if max(data.shape[1:]) <= 64 else 4)
        self.patches = nn.Conv2d(data.shape[0], channels, patch, stride=patch)
        self.patch_norm = nn.LayerNorm(channels)
        self.stages = nn.ModuleList()
        done, width = 0, channels
        for number, depth in enumerate(depths):
            stage = nn.Sequential()
            if number > 0:
                stage.append(PatchMerging(width))
                width *= 2
            for _ in range(depth):
                # The later the block, the more often it is left out.
                rate = drop_path * done / max(sum(depths) - 1, 1)
                stage.append(VSSBlock(width, states=states, expand=expand, drop_path=rate))
                done += 1
            self.stages.append(stage)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, data.classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_norm(self.patches(images).permute(0, 2, 3, 1))
        for stage in self.stages:
            x = stage(x)
        scores: Tensor = self.head(self.norm(x).mean((1, 2)))
        return scores


def vmamba_micro(data: Dataset, *, channels: int = 16, states: int = 4) -> nn.Module:
    """Two stages of one block."""
    return VMamba(data, channels=channels, depths=(1, 1), states=states, drop_path=0.0)
