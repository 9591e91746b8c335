"""Tables on the device that tell a kernel where its tensors are.

One launch can then serve all parameters of a model, however many there are. Gradients move from
step to step; their addresses are sent anew only when they changed, and without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SPARES = 4


class AddressTable:
    """Addresses (one int64 each) in one device tensor that itself never moves.

    A captured CUDA graph that reads the table therefore follows the tensors: sending new addresses
    before a replay is enough.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.tensor = torch.zeros(count, dtype=torch.int64, device=device)
        #: whether all addresses are multiples of 16, which lets kernels read four numbers at once
        self.aligned = False
        self._sent: list[int] = []
        # Copies recorded in a graph read these at every replay, so each is used for one capture.
        self._spares = [self._staging(count) for _ in range(_SPARES)] if self._pinned else []
        self._kept: list[Tensor] = []

    @property
    def _pinned(self) -> bool:
        return self.tensor.is_cuda

    def _staging(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, pin_memory=self._pinned)

    def send(self, tensors: Sequence[Tensor]) -> Tensor:
        """The table with the addresses of `tensors`."""
        addresses = list(map(Tensor.data_ptr, tensors))
        if addresses == self._sent:
            return self.tensor
        if self._pinned and torch.cuda.is_current_stream_capturing():
            if not self._spares:
                raise RuntimeError(
                    "a step can be captured after at least one step that was not, and at most "
                    f"{_SPARES} times with gradients that moved in between"
                )
            staging = self._spares.pop()
            self._kept.append(staging)
        else:
            # A fresh buffer each time: the allocator does not hand it out again before the copy ran.
            staging = self._staging(len(addresses))
        staging.copy_(torch.tensor(addresses, dtype=torch.int64))
        self.tensor.copy_(staging, non_blocking=True)
        self._sent = addresses
        self.aligned = all(address % 16 == 0 for address in addresses)
        return self.tensor
