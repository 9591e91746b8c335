"""The blocks of a step: gradients go in, directions come out, and the tail applies them.

A stack serves one list of parameters with gradients, and the buckets of their blocks. The stack
here uses torch functions; fused_stack.py has one with kernels, and placement/ one that ranks share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature
from rootfree.kernels.finite import unchanged_if
from rootfree.kernels.plan import Group
from rootfree.kernels.rounding import widened
from rootfree.kernels.tables import NumberTable
from rootfree.layout.buckets import Bucket, Slot, put_back_, select
from rootfree.layout.tiles import Piece
from rootfree.rules import LARGEST_GRADIENT
from rootfree.rules.momentum import Tail, descend_

# On a CPU a stack is processed in portions of about this many elements per thread. Temporaries then
# stay in the cache, and the allocator reuses their memory instead of asking for new pages.
CACHED = 3 * 2**19


@dataclass(frozen=True, eq=False)
class Share:
    """The part of a bucket that has gradients."""

    bucket: Bucket[Any]
    slots: list[Slot]
    rows: list[slice] | None  # the slots' blocks in the bucket; None: all of them
    blocks: int


class Part(NamedTuple):
    """The blocks of one share during a step: gradients, later replaced by directions, and state."""

    share: Share
    G: Tensor
    state: dict[str, Tensor]
    squares: Tensor | None  # (b, n) partial sums of the squared gradients, if they were made
    padded: Tensor | None = None  # G with the zeros beside it; None: it has none


def shares_of(ps: list[Tensor], buckets: list[Bucket[Any]]) -> list[Share]:
    """The parts of the buckets that belong to parameters in `ps`, or to joint pairs with one."""
    members, shares = set(ps), []
    for bucket in buckets:
        found = [
            i
            for i, slot in enumerate(bucket.slots)
            if any(piece.p in members for piece in slot.pieces)
        ]
        if found:
            slots = [bucket.slots[i] for i in found]
            rows = None if len(found) == len(bucket.slots) else bucket.rows_of(found)
            shares.append(Share(bucket, slots, rows, sum(slot.tile.blocks for slot in slots)))
    return shares


#: H of the blocks of a part
CurvatureOf = Callable[[Part], BlockCurvature]


class Stack:
    """Gathers blocks by bucket, and scatters directions into tensors shaped like the parameters."""

    ps: list[Tensor]
    shares: list[Share]
    numbers: NumberTable | None = None  # where kernels, if there are any, read hyper-parameters
    skip: Tensor | None = None  # on the device: not 0 where nothing may change

    def __init__(self, ps: list[Tensor], buckets: list[Bucket[Any]], *, wide: torch.dtype) -> None:
        self.ps = ps
        self.shares = shares_of(ps, buckets)
        self._wide = wide
        where = {p: i for i, p in enumerate(ps)}
        #: for each share: position of the parameter, piece, where the slot begins in the stack
        self._copies: list[list[tuple[int, Piece, int]]] = []
        self._holes: list[bool] = []  # whether part of a joint pair has no gradient, and is zero
        for share in self.shares:
            copies, start = [], 0
            for slot in share.slots:
                copies += [
                    (where[piece.p], piece, start) for piece in slot.pieces if piece.p in where
                ]
                start += slot.tile.blocks * slot.tile.elements
            self._copies.append(copies)
            elements = sum(math.prod((*piece.counts, *piece.sizes)) for _, piece, _ in copies)
            self._holes.append(elements < start)
        self._gs: list[Tensor] = []
        self.directions: list[Tensor] = []  # shaped like the parameters; from `keep_` to `descend_`

    @property
    def by_kernels(self) -> bool:
        """Whether kernels make all directions."""
        return all(share.bucket.plan.kernel is not None for share in self.shares)

    def send(self, tail: Tail, rates: tuple[float, ...]) -> None:
        """Send the hyper-parameters of the tail and of the factors to where kernels read them."""

    def tell(self, skip: Tensor | None) -> None:
        """`skip`: not 0 if this step may change nothing; None: it may."""
        self.skip = skip

    def gather_(self, gs: list[Tensor], *, squares: bool) -> None:
        """Take gradients in the order of the parameters."""
        self._gs = [g.contiguous() for g in gs]
        # Directions are contiguous, whatever the layout of the parameter.
        self.directions = [torch.empty(p.shape, dtype=self._wide, device=p.device) for p in self.ps]

    def precondition_(self, group: Group, curvature: CurvatureOf | None) -> None:
        """Gradients in the stack <- their directions; a curvature refreshes the state first."""
        for part in self.parts():
            self._precondition_part_(part, group, curvature)

    def _precondition_part_(self, part: Part, group: Group, curvature: CurvatureOf | None) -> None:
        bucket, H = part.share.bucket, None if curvature is None else curvature(part)
        portions = rows_at_once(part.G, part.state)
        for rows in portions:
            G, state, mine = part.G[rows], part.state, H
            if len(portions) > 1:
                state = {name: slab[rows] for name, slab in part.state.items()}
                mine = None if H is None else H.rows(rows)
            with self._unless_skipped(() if H is None else state.values()):
                U = bucket.plan.direction(group, bucket.structures, state, G, mine)
            G.copy_(U)
        self.keep_(part, refresh=H is not None)

    def _unless_skipped(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Undo changes of tensors inside if this step may change nothing."""
        return nullcontext() if self.skip is None else unchanged_if(self.skip, tensors)

    def release(self) -> None:
        """Nothing is recorded here."""

    def parts(self) -> Iterator[Part]:
        """Each share with its gradients."""
        for share, copies, holes in zip(self.shares, self._copies, self._holes, strict=True):
            make = torch.zeros if holes else torch.empty
            sizes = share.slots[0].tile.sizes
            device = self.ps[0].device
            G = make(share.blocks, *sizes, dtype=share.bucket.plan.dtype, device=device)
            for i, piece, start in copies:
                _in_stack(G, piece, start).copy_(_in_parameter(self._gs[i], piece))
            limit_(G)
            slabs, rows = share.bucket.slabs, share.rows
            state = slabs if rows is None else select(slabs, rows)
            yield Part(share, G, state, None)

    def keep_(self, part: Part, *, refresh: bool) -> None:
        """Store the directions of a part, and with `refresh` its changed state."""
        for i, piece, start in self._copies[self.shares.index(part.share)]:
            _in_parameter(self.directions[i], piece).copy_(_in_stack(part.G, piece, start))
        if part.share.rows is not None and refresh:
            put_back_(part.share.bucket.slabs, part.share.rows, part.state)

    def descend_(self, ms: list[Tensor], counters: list[Tensor], tail: Tail) -> None:
        """The tail of the step.  Changes the parameters and ms."""
        with self._unless_skipped([*self.ps, *ms, *counters]):
            if ms and ms[0].dtype != self._wide:
                with widened(ms, self._wide, counters) as wide:
                    descend_(self.ps, wide, self.directions, tail)
            else:
                descend_(self.ps, ms, self.directions, tail)
        self._gs, self.directions = [], []


def limit_(G: Tensor) -> None:
    """Limit gradients to 10¹⁸ in magnitude; float64 has the range for larger ones.  Changes G."""
    if G.dtype != torch.float64:
        most = min(LARGEST_GRADIENT, torch.finfo(G.dtype).max)
        G.clamp_(-most, most)


def _in_parameter(t: Tensor, piece: Piece) -> Tensor:
    shape = (*piece.counts, *piece.sizes)
    return t.as_strided(shape, piece.strides, t.storage_offset() + piece.offset)


def _in_stack(G: Tensor, piece: Piece, start: int) -> Tensor:
    shape = (*piece.counts, *piece.sizes)
    return G.as_strided(shape, piece.stack_strides, start + piece.stack_offset)


def rows_at_once(G: Tensor, state: Mapping[str, Tensor]) -> list[slice]:
    """Rows of a stack and its state that are processed together: on a GPU, all of them."""
    if G.device.type != "cpu":
        return [slice(0, len(G))]
    largest = max([tensor[0].numel() for tensor in (G, *state.values())])
    # Batched products give whole blocks to threads: the same number to each.
    count = torch.get_num_threads() * max(1, CACHED // largest)
    return [slice(i, min(i + count, len(G))) for i in range(0, len(G), count)]
