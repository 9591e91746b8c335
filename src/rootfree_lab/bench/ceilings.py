"""What the device can do: copies and matrix products, measured in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch

from rootfree_lab.bench.memory import free_bytes, release
from rootfree_lab.bench.timing import time_steps

_REPEATS = {"cuda": 10, "cpu": 5}
_PRODUCT = {"cuda": 8192, "cpu": 1024}  # side of the matrices
_BUFFER = {"cuda": 2 << 30, "cpu": 128 << 20}  # bytes, far beyond any cache


@dataclass(frozen=True)
class Ceilings:
    """Terabytes a second (read and written ones both count) and 10¹² operations a second."""

    copy: float
    bf16: float
    fp32: float

    def rate(self, dtype: str | None) -> float:
        return self.bf16 if dtype == "bfloat16" else self.fp32

    def best(self, other: Ceilings) -> Ceilings:
        return Ceilings(*map(max, astuple(self), astuple(other)))


def measure_ceilings(device: torch.device) -> Ceilings:
    """The fastest of some repeats of each; takes about a second."""
    ceilings = Ceilings(
        copy=_copy(device),
        bf16=_product(torch.bfloat16, device),
        fp32=_product(torch.float32, device),
    )
    release(device)
    return ceilings


def _copy(device: torch.device) -> float:
    size = min(_BUFFER[device.type], int(free_bytes(device) / 8))
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / _milliseconds(lambda: target.copy_(source), device) / 1e9


def _product(dtype: torch.dtype, device: torch.device) -> float:
    n = _PRODUCT[device.type]
    # Random numbers: zeros draw less power, and a GPU then runs faster than it ever does in use.
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    return 2 * n**3 / _milliseconds(lambda: torch.mm(a, b, out=c), device) / 1e9


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    work()
    work()
    return min(time_steps(work, lambda: None, _REPEATS[device.type], device))
