"""Gradients that are not finite: one launch finds them, and the step then changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rootfree.kernels.block_table import as_table
from rootfree.kernels.diagonal import is_dense
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.kernels.tables import AddressTable

# A program's share. It only reads, so its share may be larger than that of an update.
_CHUNK, _BLOCK, _WARPS = 8192, 4096, 8
# How many lists of tensors are remembered: gradients are missing in few patterns.
_MOST = 8
#: dtypes that the kernel reads
DTYPES = {torch.float32, torch.bfloat16, torch.float16}

_Key = tuple[torch.device, torch.dtype, tuple[int, ...]]


class FiniteLook:
    """Checks lists of tensors, and remembers their tables for the next time."""

    def __init__(self) -> None:
        self._lists: dict[_Key, _List] = {}

    def __call__(self, gs: Sequence[Tensor]) -> Tensor:
        """1 if a number in these tensors is not finite, else 0.

        All tensors are on one device, and so is the result, in float32.
        """
        flag = torch.zeros((), device=gs[0].device)
        for dtype in dict.fromkeys(g.dtype for g in gs):
            alike = [g for g in gs if g.dtype == dtype]
            key = (flag.device, dtype, tuple(map(Tensor.numel, alike)))
            if key not in self._lists:
                kept = list(self._lists.items())[1 - _MOST :]
                self._lists = dict([*kept, (key, _List(key))])
            self._lists[key].look(alike, flag)
        return flag

    def stock_up(self) -> None:
        """Prepare for future captures."""
        for known in self._lists.values():
            known.places.stock_up()


class _List:
    """The tables for tensors of these sizes."""

    def __init__(self, key: _Key) -> None:
        device, _, sizes = key
        chunks = [(i, chunk) for i, size in enumerate(sizes) for chunk in range(-(-size // _CHUNK))]
        self._items = as_table(chunks, torch.int32, device)
        self._sizes = as_table(sizes, torch.int64, device)
        self.places = AddressTable(len(sizes), device, beside=(self._items, self._sizes))

    def look(self, gs: Sequence[Tensor], flag: Tensor) -> None:
        """flag <- 1 if a number is not finite."""
        gs = [g if g.is_contiguous() or is_dense(g) else g.contiguous() for g in gs]
        self.places.stock_up()
        kernels = triton_kernels()
        with torch.cuda.device_of(flag):
            self.places.send(gs)
            launch(
                kernels.finite.finite_kernel, len(self._items),
                self._items, self._sizes, self.places.tensor, flag,
                G=kernels.dtype(gs[0]), ALIGNED=self.places.aligned,
                CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip


@contextmanager
def unchanged_if(flag: Tensor, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Undo, on the device, what is done to the tensors inside if the flag is set.

    For steps without kernels: they keep a copy of what they change until they end.
    """
    tensors = [getattr(t, "_local_tensor", t) for t in tensors]
    copies = [t.clone() for t in tensors]
    yield
    for t, copy in zip(tensors, copies, strict=True):
        t.copy_(torch.where(flag != 0, copy, t))
