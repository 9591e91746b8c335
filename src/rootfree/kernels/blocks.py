"""The step of the matrix methods around their directions: two launches in, three launches out.

Gradients of all parameters are gathered into one stack of blocks, directions take their place, and
the tail (cap, momentum, decay, descent) reads them from there: nothing parameter-shaped is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rootfree.buckets import Bucket
from rootfree.kernels.addresses import AddressTable
from rootfree.kernels.block_table import (
    COLS,
    ROWS,
    WARPS,
    aligned,
    as_table,
    entries_of,
    items_of,
    shares_of,
)
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.kernels.replay import Recorder, Replays

Tensors = list[Tensor]

# Models of at most so many elements have their directions replayed from graphs. These hold their
# temporaries, up to seven bytes an element; larger models keep the device busy without.
REPLAYED = 2**25


@dataclass
class Stack:
    """Blocks of some buckets, one after the other, and the tables that say where they belong."""

    ps: Tensors
    members: dict[Tensor, int]  # position of each parameter
    buckets: list[Bucket]
    entries: Tensor
    items: Tensor
    even: int  # the first so many items may be read eight numbers at a time
    spans: Tensor  # first and last item of each parameter
    sizes: Tensor
    shares: list[tuple[int, int, int]]  # of each bucket: first element, blocks, sums a block
    ragged: bool  # whether some blocks have fewer sums than that
    elements: int
    here: AddressTable
    there: AddressTable
    replays: Replays | None = None
    values: Tensor = field(init=False)
    sums: Tensor = field(init=False)  # of squares
    _kept: tuple[Tensor, Tensor] | None = None

    def make_room(self, dtype: torch.dtype) -> None:
        """Memory for blocks and sums: the same at every step where they are replayed."""
        stays = self._replays_now() is not None
        room = self._kept if stays else None
        if room is None:
            device = self.entries.device
            total = sum(blocks * count for _, blocks, count in self.shares)
            # Blocks that have fewer sums than others of their bucket leave zeros.
            make = torch.zeros if self.ragged else torch.empty
            room = (
                torch.empty(self.elements, dtype=dtype, device=device),
                make(total, dtype=torch.float64, device=device),
            )
            if stays:
                self._kept = room
        self.values, self.sums = room

    def replay(self, kind: tuple[Hashable, ...], work: Callable[[], None]) -> None:
        """Do work on the stack and the state of its buckets, from a graph where that is faster.

        `kind` has all that it depends on beside the contents of tensors.
        """
        replays = self._replays_now()
        if replays is None:
            work()
        else:
            slabs = [slab.data_ptr() for bucket in self.buckets for slab in bucket.slabs.values()]
            replays((*kind, *slabs), work)

    def _replays_now(self) -> Replays | None:
        """None also where somebody records the whole step."""
        recorded = self.replays is not None and torch.cuda.is_current_stream_capturing()
        return None if recorded else self.replays

    def parts(self) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        """Each bucket with its part (b, d_1..d_N) of the stack, and (b, count) sums of squares."""
        place = 0
        for bucket, (first, blocks, count) in zip(self.buckets, self.shares, strict=True):
            sizes = bucket.slots[0].tile.sizes
            length = blocks * bucket.slots[0].tile.elements
            part = self.values[first : first + length].view(blocks, *sizes)
            sums = self.sums[place : place + blocks * count].view(blocks, count)
            place += blocks * count
            yield bucket, part, sums


class FusedBlocks:
    """Gathers and finishes with the kernels of triton_blocks.py."""

    _recorder: Recorder | None = None  # one for all stacks: they never run at the same time

    def stack(self, ps: Tensors, buckets: list[Bucket], *, model: int | None = None) -> Stack:
        """The stack of these buckets, for the parameters that have gradients.

        `model`: how many elements the whole model has, where directions may be replayed.
        """
        stack = _layout(ps, buckets)
        if model is not None and model <= REPLAYED and ps[0].is_cuda:
            self._recorder = self._recorder or Recorder()
            stack.replays = Replays(self._recorder)
        return stack

    def gather_(self, stack: Stack, gs: Tensors, *, dtype: torch.dtype, squares: bool) -> None:
        """Fill the stack with gradients (and their sums of squares)."""
        gs = [g if g.is_contiguous() else g.contiguous() for g in gs]
        if len({g.dtype for g in gs}) > 1:
            gs = [g.float() for g in gs]
        kernels = triton_kernels()
        stack.make_room(dtype)
        stack.there.send(gs)
        for items, even in _launches(stack, stack.there.aligned):
            launch(
                kernels.blocks.gather_kernel,
                len(items),
                items,
                stack.entries,
                stack.there.tensor,
                stack.values,
                stack.sums,
                G=kernels.dtype(gs[0]),
                SQUARES=squares,
                ALIGNED=even,
                ROWS=ROWS,
                COLS=COLS,
                num_warps=WARPS,
            )

    def descend_(
        self,
        stack: Stack,
        ps: Tensors,
        ms: Tensors,
        counters: Tensors,
        *,
        lr: float | Tensor,
        alpha1: float,
        kappa: float,
        cap: float | None,
    ) -> None:
        """u <- u·min(1, cap/rms(u)); m <- α₁ m + u + κ p; p <- p - β₁ m.  Changes ps, ms."""
        if isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = lr.item()
        # Other layouts of memory (channels last) are brought to this one and back.
        straight = [[t if t.is_contiguous() else t.contiguous() for t in kind] for kind in (ps, ms)]
        kernels, device = triton_kernels(), ps[0].device
        stack.here.send([*straight[0], *(straight[1] or ps), *(counters or ps)])
        even = stack.here.aligned
        share: dict[str, Any] = {"ROWS": ROWS, "COLS": COLS, "num_warps": WARPS}
        scales = torch.empty(len(ps), device=device)
        if cap is not None:
            sums = torch.empty(len(stack.items), device=device)
            done = 0
            for items, wide in _launches(stack, True):
                launch(
                    kernels.blocks.stack_squares_kernel,
                    len(items),
                    items,
                    stack.entries,
                    stack.values,
                    sums[done:],
                    cap,
                    ALIGNED=wide,
                    **share,
                )
                done += len(items)
            launch(
                kernels.blocks.cap_kernel,
                len(ps),
                sums,
                stack.spans,
                stack.sizes,
                scales,
                BLOCK=512,
            )
        for items, wide in _launches(stack, even):
            launch(
                kernels.blocks.tail_kernel,
                len(items),
                items,
                stack.entries,
                stack.here.tensor,
                stack.values,
                scales,
                lr if isinstance(lr, Tensor) else stack.here.tensor,
                len(ps),
                0.0 if isinstance(lr, Tensor) else lr,
                alpha1,
                kappa,
                P=kernels.dtype(ps[0]),
                M=kernels.dtype((ms or ps)[0]),
                MOMENTUM=bool(ms),
                CAP=cap is not None,
                LR_AT=isinstance(lr, Tensor),
                ALIGNED=wide,
                **share,
            )
        for kind, copies in zip((ps, ms), straight, strict=True):
            for t, copy in zip(kind, copies, strict=True):
                if copy is not t:
                    t.copy_(copy)
            torch.autograd.graph.increment_version(kind)  # autograd must know that they changed
        if counters and ms:
            torch._foreach_add_(counters, 1)
        del stack.values, stack.sums


def _launches(stack: Stack, wide: bool) -> Iterator[tuple[Tensor, bool]]:
    """The items in one or two launches: those that may be read eight at a time, and the others."""
    if not wide:
        yield stack.items, False
        return
    for items, even in ((stack.items[: stack.even], True), (stack.items[stack.even :], False)):
        if len(items):
            yield items, even


def _layout(ps: Tensors, buckets: list[Bucket]) -> Stack:
    members = {p: i for i, p in enumerate(ps)}
    device = ps[0].device
    per_parameter: list[list[tuple[Any, int]]] = [[] for _ in ps]  # (entry, place of its sums)
    shares, elements, place, ragged = [], 0, 0, False
    for bucket in buckets:
        first = elements
        cut: list[tuple[int, list[Any]]] = []  # (parameter, rectangles) of each block
        for slot in bucket.slots:
            if slot.p not in members:
                continue
            which = members[slot.p]
            cut += [(which, r) for r in entries_of(slot.tile, which=which, stack=elements)]
            elements += slot.tile.blocks * slot.tile.elements
        # A block inside a larger parameter has rows of its own, a whole parameter has none.
        counts = {sum(map(shares_of, rectangles)) for _, rectangles in cut}
        most, ragged = max(counts), ragged or len(counts) > 1
        for which, rectangles in cut:
            at = place
            for entry in rectangles:
                per_parameter[which].append((entry, at))
                at += shares_of(entry)
            place += most
        shares.append((first, len(cut), most))
        elements += -elements % 64  # the next bucket starts where the matrix units like it
    # Parameters that can be read eight numbers at a time come first.
    order = sorted(range(len(ps)), key=lambda i: not aligned([e for e, _ in per_parameter[i]]))
    entries: list[Any] = []
    items: list[Any] = []
    spans = [(0, 0)] * len(ps)
    even = 0
    for i in order:
        begin = len(items)
        for entry, at in per_parameter[i]:
            items += items_of(entry, number=len(entries), place=at)
            entries.append(entry)
        spans[i] = (begin, len(items))
        if aligned([e for e, _ in per_parameter[i]]):
            even = len(items)
    tables = (
        as_table(entries, torch.int64, device),
        as_table(items, torch.int32, device),
        as_table(spans, torch.int32, device),
        as_table([p.numel() for p in ps], torch.int64, device),
    )
    return Stack(
        ps,
        members,
        buckets,
        *tables[:2],
        even,
        *tables[2:],
        shares,
        ragged,
        elements,
        AddressTable(3 * len(ps), device, beside=tables),
        AddressTable(len(ps), device, beside=tables),
    )
