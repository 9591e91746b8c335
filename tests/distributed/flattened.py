"""Two ranks under FSDP1; run by launch.py."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.fsdp import FullyShardedDataParallel

import rootfree

TURNS = (False, True)  #: of use_orig_params


def trained(turn: int | None) -> list[Tensor]:
    """The parameters after three steps on this rank's half of each batch; None: in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    ours, wrapped = slice(None), model
    if turn is not None:
        ours, kept = slice(4 * get_rank(), 4 * get_rank() + 4), TURNS[turn]
        cpu = torch.device("cpu")
        with warnings.catch_warnings(action="ignore"):  # of torch: FSDP1 is on its way out
            wrapped = FullyShardedDataParallel(model, use_orig_params=kept, device_id=cpu)
    options = {"batch_size": 8, "nonfinite": "propagate"}
    optimizer = rootfree.RFRMSprop(wrapped.parameters(), **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        wrapped(x[ours]).square().mean().backward()
        optimizer.step()
    if turn is None:
        return [p.detach().clone() for p in model.parameters()]
    with FullyShardedDataParallel.summon_full_params(wrapped):
        return [p.detach().clone() for p in model.parameters()]


def run(turn: int, folder: Path) -> list[Tensor]:
    return trained(turn)
