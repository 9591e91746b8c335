"""The stack of a step with kernels: a few launches in, a few out, no parameter-shaped temporaries.

The gradients of all parameters are gathered into one stack of blocks. Directions replace them
there, and the tail reads the directions from the stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature, OuterProducts
from rootfree.kernels.axis_products import without
from rootfree.kernels.block_table import (
    COLUMN,
    SHARE,
    WARPS,
    as_table,
    in_order,
    placed,
)
from rootfree.kernels.fixed import replay
from rootfree.kernels.graphs import Recordings, side_by_side
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.kernels.plan import Group
from rootfree.kernels.rounding import advance_
from rootfree.kernels.stack import CurvatureOf, Part, Stack, shares_of
from rootfree.kernels.tables import NUMBERS, SKIP, AddressTable, NumberTable, send_numbers
from rootfree.layout.buckets import Bucket, put_back_, select
from rootfree.rules.momentum import Tail

# Items per program in kernels that only read: looking up the place of one would take most of the
# time.
_SEVERAL = 4
#: items that are launched together, their number, their site, and constants of the kernels
_Launch: TypeAlias = tuple[Tensor, int, tuple[Any, ...], dict[str, Any]]
# Hyper-parameters that rules put into their launches; kernels read them from the device.
_RATES = ("batch_size", "precond_lr", "damping", "gamma", "riemannian_momentum", "update_every")


class KernelStack(Stack):
    """A stack in which kernels make the directions, where there are any; directions stay in it."""

    def send(self, tail: Tail, rates: tuple[float, ...]) -> None:
        """Send the hyper-parameters to the device: those of the tail, then those of the factors."""
        if self.numbers is not None:
            send_numbers(self.numbers, tail, rates)

    def tell(self, skip: Tensor | None) -> None:
        """`skip`: not 0 if this step may change nothing; None: it may.  Call after `send`."""
        self.skip = skip
        if skip is not None and self.numbers is not None:  # where all kernels read it, recorded too
            self.skip = self.numbers.tensor[SKIP].copy_(skip)

    def _precondition_part_(self, part: Part, group: Group, curvature: CurvatureOf | None) -> None:
        kernel, refresh = part.share.bucket.plan.kernel, curvature is not None
        if kernel is None or self.numbers is None:
            super()._precondition_part_(part, group, curvature)
        else:
            H = None if curvature is None else curvature(part)
            words = {} if H is None or _is_default(H, part) else {"H": H}
            G = part.G if part.padded is None else part.padded
            kernel(part.state, G, part.squares, self.numbers.tensor, refresh=refresh, **words)
            self.keep_(part, refresh=refresh)

    def keep_(self, part: Part, *, refresh: bool) -> None:
        """Store the changed state of a part; its directions are in place already."""
        if part.share.rows is not None and refresh:
            put_back_(part.share.bucket.slabs, part.share.rows, part.state)


class FusedStack(KernelStack):
    """The blocks of some buckets, one after the other, and tables of where they belong."""

    def __init__(
        self,
        ps: list[Tensor],
        buckets: list[Bucket[Any]],
        recordings: Recordings | None = None,
        *,
        given: bool = False,
    ) -> None:
        """`given`: whether the curvature is given; it is then assembled outside of recordings."""
        self.ps = ps
        self.shares = shares_of(ps, buckets)
        self._dtype = self.shares[0].bucket.plan.dtype
        self._recordings = recordings  # None: nothing is replayed
        self._is_given = given
        self._baked = () if self.by_kernels else _RATES
        self._kept: tuple[Tensor, Tensor] | None = None
        self._lay_out()

    def _lay_out(self) -> None:
        device = self.ps[0].device
        self._placed = placed(self.shares, {p: i for i, p in enumerate(self.ps)})
        rectangles, items, spans, (regular, wide) = in_order(self._placed)
        self._rectangles = as_table(rectangles, torch.int64, device)
        self._items = as_table(items, torch.int32, device)
        # What distinguishes launches from those of other stacks (see `launch`).
        self._site = (device, self._dtype, self._items.data_ptr() % 16)
        columns = self._launches_of(slice(wide, None), COLUMN)
        self._unaligned = [*self._launches_of(slice(wide), SHARE), *columns]
        self._aligned = [
            *self._launches_of(slice(regular), SHARE, aligned=True),
            *self._launches_of(slice(regular, wide), SHARE),
            *columns,
        ]
        self._spans = as_table(spans, torch.int32, device)  # first and last item of each parameter
        self._sizes = as_table([p.numel() for p in self.ps], torch.int64, device)
        tables = (self._rectangles, self._items, self._spans, self._sizes)
        self._gradients = AddressTable(len(self.ps), device, beside=tables)
        self._state = AddressTable(3 * len(self.ps), device, beside=tables)
        self.numbers: NumberTable = NumberTable(NUMBERS, device)

    def send(self, tail: Tail, rates: tuple[float, ...]) -> None:
        """Send the hyper-parameters to the device: those of the tail, then those of the factors."""
        self._gradients.stock_up()
        self._state.stock_up()
        super().send(tail, rates)

    def gather_(self, gs: list[Tensor], *, squares: bool) -> None:
        """Fill the stack with gradients, and with `squares` also their sums of squares."""
        gs = [g if g.is_contiguous() else g.contiguous() for g in gs]
        if len({g.dtype for g in gs}) > 1:
            gs = [g.float() for g in gs]
        self._make_room()
        self._gradients.send(gs)
        kernels = triton_kernels()
        G = kernels.dtype(gs[0])
        for items, count, site, constants in self._launches(self._gradients.aligned):
            launch(
                kernels.blocks.gather_kernel, count,
                items, self._rectangles, self._gradients.tensor, self._values, self._squares,
                site=(*site, G, squares), G=G, SQUARES=squares, **constants,
            )  # fmt: skip

    def _make_room(self) -> None:
        """Allocate memory for blocks and sums; if steps are replayed, always the same memory."""
        room = self._kept
        if room is None or self._recordings_now() is None:
            device = self._items.device
            make = torch.zeros if self._placed.ragged else torch.empty
            room = (
                torch.empty(self._placed.elements, dtype=self._dtype, device=device),
                make(self._placed.sums, dtype=torch.float64, device=device),
            )
            if self._recordings_now() is not None:
                self._kept = room
        self._values, self._squares = room
        if self._placed.gaps:
            self._values.zero_()

    def precondition_(self, group: Group, curvature: CurvatureOf | None) -> None:
        """Gradients in the stack <- their directions, from a graph where that is faster."""
        recordings = self._recordings_now()
        if recordings is None:
            self._precondition_parts_(group, curvature, {})
            return
        # all that the work depends on beside the contents of tensors
        rates = [group.get(name) for name in self._baked]
        slabs = [t.data_ptr() for s in self.shares for t in s.bucket.slabs.values()]
        kind, work = (curvature is not None, *rates, *slabs), self._precondition_parts_
        if curvature is not None and self._is_given:
            parts = list(self.parts())
            found = {i: curvature(part) for i, part in enumerate(parts)}
            given = {i: H for i, H in found.items() if not _is_default(H, parts[i])}
            replay(recordings, kind, partial(work, group, curvature), given)
        else:
            recordings(kind, partial(work, group, curvature, {}))

    def _precondition_parts_(
        self,
        group: Group,
        curvature: CurvatureOf | None,
        given: Mapping[int, BlockCurvature],
    ) -> None:
        """`given`: an H to use instead of the curvature's, by the index of the share."""
        works = []
        for i, part in enumerate(list(self.parts())):  # all exist at once
            H = partial(_same, given[i]) if i in given else curvature
            works.append((part.G.numel(), partial(self._precondition_part_, part, group, H)))
        side_by_side(works, self.ps[0].device)

    def release(self) -> None:
        """Drop recorded graphs."""
        if self._recordings is not None:
            self._recordings.release()

    def _recordings_now(self) -> Recordings | None:
        """None also while a caller records the whole step."""
        recorded = self._recordings is not None and torch.cuda.is_current_stream_capturing()
        return None if recorded else self._recordings

    def parts(self) -> Iterator[Part]:
        """Each share with its part of the stack and (b, n) sums of squares."""
        for share, place in zip(self.shares, self._placed.shares, strict=True):
            first, rooms, start, sums = place
            sizes, blocks = share.slots[0].tile.sizes, share.blocks
            values = self._values[first : first + blocks * math.prod(rooms)].view(blocks, *rooms)
            G = values if rooms == sizes else without(values, sizes)
            squares = self._squares[start : start + blocks * sums].view(blocks, sums)
            slabs, rows = share.bucket.slabs, share.rows
            state = slabs if rows is None else select(slabs, rows)
            yield Part(share, G, state, squares, values)

    def descend_(self, ms: list[Tensor], counters: list[Tensor], tail: Tail) -> None:
        """The tail of the step.  Changes the parameters and ms."""
        ps, lr = self.ps, tail.lr
        # Tensors in other layouts (channels last) are made contiguous, and copied back at the end.
        moved = [[t if t.is_contiguous() else t.contiguous() for t in kind] for kind in (ps, ms)]
        kernels, count = triton_kernels(), len(ps)
        self._state.send([*moved[0], *(moved[1] or ps), *(counters or ps)])
        scales = torch.empty(2 * count, device=ps[0].device) if tail.cap or tail.rms else None
        arguments = [
            self._rectangles,
            self._state.tensor,
            self._values,
            self._values if scales is None else scales,
            lr if isinstance(lr, Tensor) and lr.is_cuda else self.numbers.tensor,
            self.numbers.tensor,
        ]
        constants: dict[str, Any] = {
            "P": kernels.dtype(ps[0]),
            "M": kernels.dtype((ms or ps)[0]),
            "MOMENTUM": bool(ms),
            "NESTEROV": bool(ms) and tail.nesterov,
            "CAP": tail.cap is not None,
            "CLIP": tail.clip is not None,
            "RMS": tail.rms is not None,
            "DECOUPLED": tail.coupled == 0,
        }
        for of_step, wanted in ((False, tail.cap), (True, tail.rms)):
            if wanted is not None and scales is not None:
                self._measure(arguments, constants, scales, of_step=of_step)
        rate = arguments[4]
        looks = (rate.dtype, rate.data_ptr() % 16, count, *constants.values())
        for items, programs, site, shape in self._launches(self._state.aligned):
            launch(
                kernels.blocks.tail_kernel, programs, items, *arguments, count,
                site=(*site, *looks), **shape, **constants,
            )  # fmt: skip
        for kind, copies in zip((ps, ms), moved, strict=True):
            for t, copy in zip(kind, copies, strict=True):
                if copy is not t:
                    t.copy_(copy)
            torch.autograd.graph.increment_version(kind)  # tell autograd that they changed
        if counters and ms:
            advance_(counters, 1, skip=self.skip)
        del self._values, self._squares

    def _measure(
        self, arguments: list[Any], constants: dict[str, Any], scales: Tensor, *, of_step: bool
    ) -> None:
        """scales <- multipliers of the directions or, `of_step`, of whole steps."""
        kernels = triton_kernels()
        sums = torch.empty(len(self._items), dtype=torch.float64, device=scales.device)
        done, chosen = 0, ("M", "MOMENTUM", "NESTEROV", "CAP", "CLIP")
        constants = {key: constants[key] for key in chosen}
        looks = (len(self.ps), of_step, *constants.values())
        for items, count, site, shape in self._launches(self._state.aligned or not of_step):
            launch(
                kernels.blocks.squares_kernel, -(-count // _SEVERAL),
                items, *arguments[:4], self.numbers.tensor, sums[done:], len(self.ps), count,
                site=(*site, *looks, done % 2),
                OF_STEP=of_step, SEVERAL=_SEVERAL, **shape, **constants,
            )  # fmt: skip
            done += count
        launch(
            kernels.blocks.scale_kernel, len(self.ps),
            sums, self._spans, self._sizes, self.numbers.tensor, scales, len(self.ps),
            site=(*self._site, *looks), OF_STEP=of_step, BLOCK=512,
        )  # fmt: skip

    def _launches(self, aligned: bool) -> list[_Launch]:
        """`aligned`: whether all tensors begin where eight numbers can be read at once."""
        return self._aligned if aligned else self._unaligned

    def _launches_of(
        self, part: slice, share: tuple[int, int], *, aligned: bool = False
    ) -> list[_Launch]:
        """The launch of a part of the items; none if that is empty."""
        items = self._items[part]
        constants = {"ALIGNED": aligned, "ROWS": share[0], "COLS": share[1], "num_warps": WARPS}
        site = (*self._site, aligned, share)
        return [(items, len(items), site, constants)] if len(items) else []


def _is_default(H: BlockCurvature, part: Part) -> bool:
    """Whether H is B·ggᵀ, which kernels compute themselves."""
    return isinstance(H, OuterProducts) and H.V is part.G


def _same(H: BlockCurvature, _: Part) -> BlockCurvature:
    return H
