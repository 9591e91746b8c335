"""A number on a device that the host reads later."""

from __future__ import annotations

import torch
from torch import Tensor


class ReadLater:
    """One whole number, on its way to the host.

    On CUDA, reading it waits for what was queued before this was made, not for what came after.
    """

    def __init__(self, number: Tensor) -> None:
        self._number, self._there = number, None
        if number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(number.device))

    def __int__(self) -> int:
        if self._there is not None:
            self._there.synchronize()
        return int(self._number)
