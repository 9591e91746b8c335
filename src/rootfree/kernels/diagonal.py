"""The diagonal methods on a GPU: one launch for a whole list of parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from rootfree.kernels.block_table import as_table
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.kernels.rounding import advance_
from rootfree.kernels.tables import AddressTable, NumberTable
from rootfree.rules.diagonal import TINY, reach
from rootfree.rules.momentum import Tail

Tensors = list[Tensor]

# A program's share: large enough to amortise looking up its place, small enough to spread the work.
CHUNK, BLOCK, WARPS = 4096, 1024, 8


class FusedDiagonal:
    """Runs the kernel of triton_diagonal.py on one list of parameters."""

    def __init__(self, ps: list[Tensor]) -> None:
        device = ps[0].device
        chunks = [(i, chunk) for i, p in enumerate(ps) for chunk in range(-(-p.numel() // CHUNK))]
        self._ps = ps
        self._items = as_table(chunks, torch.int32, device)
        self._sizes = as_table([p.numel() for p in ps], torch.int64, device)
        tables = (self._items, self._sizes)
        #: parameters, preconditioners, momenta, counters
        self._state = AddressTable(4 * len(ps), device, beside=tables)
        #: not in `_state`, because they are not aligned
        self._counts = AddressTable(len(ps), device, beside=tables)
        self._gradients = AddressTable(len(ps), device, beside=tables)
        self._numbers = NumberTable(11, device)
        self._strides: list[tuple[int, ...]] | None = None  # None: not supported by the kernel
        self.fits = False  # whether the kernel could do the last update

    def send(self, tail: Tail, *, beta2: float, gamma: float, B: int, lam: float) -> None:
        """Bring the hyper-parameters to the device."""
        self._gradients.stock_up()
        self._state.stock_up()
        self._counts.stock_up()
        keep, gain = 1 - beta2 * gamma, beta2 * B
        others = (tail.alpha1, max(lam, TINY), tail.kappa, tail.clip or 1.0)
        rates = (float(reach(gain=gain, gamma=gamma)), beta2, float(B))
        self._numbers.send(tail.lr, keep, gain, *others, *rates, 0.0)

    def update_(
        self,
        update: str,
        gs: list[Tensor],
        ss: list[Tensor],
        ms: list[Tensor],
        counters: list[Tensor],
        steps: list[Tensor],
        tail: Tail,
        skip: Tensor | None = None,
    ) -> bool:
        """Update parameters, ss, ms and counters in place; whether the kernel could.

        It supports plain tensors that are not in fp64, with gradients and state laid out like their
        parameters. For others it does nothing. `steps`: how often each parameter was updated, for a
        fast start; empty: there is none. `skip`, on the device: nothing changes if it is not 0.
        """
        ps, lr = self._ps, tail.lr
        # Without momentum or counters, the kernel does not read their addresses.
        mine = [*ps, *ss, *(ms or ss), *(counters or ss)]
        self.fits = self._fit(mine, gs, rounded=bool(counters))
        if not self.fits:
            return False
        if steps:
            self._counts.send(steps)
        kernels, averaged = triton_kernels(), update == "averaged"
        with torch.cuda.device_of(ps[0]):
            if skip is not None:
                self._numbers.tensor[-1].copy_(skip)
            launch(
                kernels.diagonal.diagonal_kernel, len(self._items),
                self._items, self._sizes, self._state.tensor, self._gradients.tensor,
                self._counts.tensor,
                lr if isinstance(lr, Tensor) and lr.is_cuda else self._numbers.tensor,
                self._numbers.tensor, len(ps),
                P=kernels.dtype(ps[0]), G=kernels.dtype(gs[0]), S=kernels.dtype(ss[0]),
                AVERAGED=averaged, MOMENTUM=bool(ms), NESTEROV=bool(ms) and tail.nesterov,
                DECOUPLED=tail.decoupled or averaged, CLIP=tail.clip is not None,
                FAST=bool(steps),
                ALIGNED=self._state.aligned and self._gradients.aligned,
                CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        if counters:
            advance_(counters, 2 if ms else 1, skip=skip)
        for kind in (ps, ss, ms):  # tell autograd that they changed
            torch.autograd.graph.increment_version(kind)
        return True

    def _fit(self, mine: list[Tensor], gs: list[Tensor], *, rounded: bool) -> bool:
        """Whether the kernel supports the layouts and dtypes; if so, sends it all addresses.

        Parameters and state that have not moved since the last step are not checked again.
        """
        ps = self._ps
        if self._state.send(mine):
            count = len(ps)
            alike = all(_alike(t, ps[i % count]) for i, t in enumerate(mine[: 3 * count]))
            # The noise of rounding numbers elements in the order of their indices.
            dense = all(p.is_contiguous() or (not rounded and is_dense(p)) for p in ps)
            self._strides = [p.stride() for p in ps] if dense and alike else None
        if self._strides is None or {type(g) for g in gs} != {Tensor}:
            return False
        if self._strides != [g.stride() for g in gs] and not all(map(_alike, gs, ps)):
            return False
        if len({g.dtype for g in gs}) > 1:
            return False
        self._gradients.send(gs)
        return True


def _alike(t: Tensor, p: Tensor) -> bool:
    """Whether t is laid out like p; strides of axes of size one do not matter."""
    axes = zip(t.stride(), p.stride(), p.shape, strict=True)
    return t.shape == p.shape and all(mine == its or size == 1 for mine, its, size in axes)


def is_dense(p: Tensor) -> bool:
    """Whether the elements fill one piece of memory, with the axes in any order."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
