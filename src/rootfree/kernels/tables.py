"""Tables on the device: the addresses of a kernel's tensors, and its hyper-parameters.

With them, one launch serves all parameters of a model, and a recorded launch follows a schedule.
Gradients may move from step to step. Addresses and numbers are sent only when they have changed,
and the host does not wait for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rootfree.rules.momentum import Tail

_SPARES = 4
# The place in a stack's numbers of the flag that forbids changes if it is not 0.
SKIP = 11

# What captured graphs read at every replay. Nothing tells us when a graph is gone, and it may
# outlive the optimizer; so a few kilobytes per capture are never freed.
_captured: list[Any] = []


class AddressTable:
    """Addresses, one int64 each, in a tensor on the device: `tensor`.

    `beside` are other tables that the same kernels read; they must live as long as captured graphs.
    """

    def __init__(
        self, count: int, device: torch.device, *, beside: tuple[Tensor, ...] = ()
    ) -> None:
        self._own = torch.zeros(count, dtype=torch.int64, device=device)
        self.tensor = self._own
        #: whether all addresses are multiples of 16, which lets kernels read four numbers at once
        self.aligned = False
        self._sent: list[int] = []
        self._beside = beside
        # A capture cannot allocate pinned memory, so some is kept ready; each serves one capture.
        self._spares: list[Tensor] = []
        self.stock_up()

    def _staging(self) -> Tensor:
        pinned = self._own.is_cuda
        return torch.empty(len(self._own), dtype=torch.int64, device="cpu", pin_memory=pinned)

    def stock_up(self) -> None:
        """Allocate pinned memory for future captures."""
        if self._own.is_cuda and not torch.cuda.is_current_stream_capturing():
            while len(self._spares) < _SPARES:
                self._spares.append(self._staging())

    def send(self, tensors: Sequence[Tensor]) -> bool:
        """Put the addresses of `tensors` into the table; whether any has changed."""
        addresses = list(map(Tensor.data_ptr, tensors))
        captured = self._own.is_cuda and torch.cuda.is_current_stream_capturing()
        if addresses == self._sent and not captured and self.tensor is self._own:
            return False
        if captured:
            # The graph gets its own table: a replay must not change the one that later steps read.
            if not self._spares:
                raise RuntimeError(
                    f"the step was captured {_SPARES} times without running as usual in between; "
                    "call step() once outside a capture"
                )
            staging = self._spares.pop()
            _captured.append((staging, self._beside))
            self.tensor = torch.empty_like(self._own)
        else:
            # A new one each time: its memory is not reused before the copy has run.
            staging = self._staging()
            self.tensor = self._own
        staging.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        self.tensor.copy_(staging, non_blocking=True)
        self._sent = addresses
        self.aligned = all(address % 16 == 0 for address in addresses)
        return True


class NumberTable:
    """Hyper-parameters, one fp32 number each, in a tensor on the device: `tensor`."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.tensor = torch.zeros(count, dtype=torch.float32, device=device)
        self._sent: tuple[float, ...] | None = None

    def send(self, lr: float | Tensor, *others: float) -> None:
        """Put numbers into the table; graphs that read it see them from their next replay on.

        If lr is a tensor on the device, kernels read it there, not in the table.
        """
        if isinstance(lr, Tensor):
            lr = lr.item() if lr.device.type == "cpu" else 0.0
        numbers = tuple(map(float, (lr, *others)))
        captured = self.tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        if captured:
            _captured.append(self.tensor)
        if numbers == self._sent:
            return
        if captured:  # the graph writes them itself, at each replay
            for place, number in zip(self.tensor.unbind(), numbers, strict=True):
                place.fill_(number)
            self._sent = None
            return
        sent = torch.tensor(
            numbers, dtype=torch.float32, device="cpu", pin_memory=self.tensor.is_cuda
        )
        self.tensor.copy_(sent, non_blocking=True)
        self._sent = numbers


# The number of hyper-parameters of a step on blocks.
NUMBERS = 12


def send_numbers(table: NumberTable, tail: Tail, rates: tuple[float, ...]) -> None:
    """Put the hyper-parameters of the tail, then of the factors, where kernels expect them."""
    cap, rms, clip = tail.cap or 1.0, tail.rms or 1.0, tail.clip or 1.0
    first = (tail.lr, tail.alpha1, tail.kappa, cap, rms)
    table.send(*first, *rates, tail.least, clip, 0.0)  # the last: whether to skip
