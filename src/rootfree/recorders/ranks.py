"""Sums over data-parallel ranks; the only file of the recorders that knows torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Ranks:
    """The ranks that average gradients: a process group, "world" (if there is one), or None."""

    def __init__(self, group: Any = "world") -> None:
        self._alone = group is None
        self._group = None if group == "world" else group  # torch's name for all ranks is None

    @property
    def size(self) -> int:
        """1 when there is nothing to reduce."""
        distributed = torch.distributed
        if self._alone or not (distributed.is_available() and distributed.is_initialized()):
            return 1
        return distributed.get_world_size(self._group)

    @property
    def rank(self) -> int:
        """0 when there is nothing to reduce."""
        return torch.distributed.get_rank(self._group) if self.size > 1 else 0

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place."""
        works = [torch.distributed.all_reduce(t, group=self._group, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def any(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """For each flag: whether any rank has it set. Waits for the device."""
        counts = torch.tensor([int(flag) for flag in flags], device=device)
        self.sum_([counts])
        return [count > 0 for count in counts.tolist()]

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, which may have different numbers of them."""
        if self.size == 1:
            return rows
        lengths = [torch.zeros((), dtype=torch.int64, device=rows.device) for _ in range(self.size)]
        mine = torch.tensor(len(rows), device=rows.device)
        torch.distributed.all_gather(lengths, mine, group=self._group)
        counts = [int(length) for length in lengths]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
