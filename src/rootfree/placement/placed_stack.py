"""The blocks of a step on many ranks: pieces of gradients go to the owners, directions come back.

The interface is that of `kernels/stack.py`. Gradients and directions travel in the dtype of the
products, which would round them anyway. They travel in rounds (`rounds.py`): while one round is
computed, the next is on its way to the owners and the previous one on its way back. Kernels compute
directions where they can, torch functions do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rootfree.kernels.fused_stack import KernelStack
from rootfree.kernels.stack import Part, Share, limit_
from rootfree.kernels.tables import NUMBERS, NumberTable
from rootfree.layout.buckets import Bucket, select
from rootfree.placement.boxes import Box, shape_of
from rootfree.placement.exchange import Exchange, Flight, piece_of, stand_in
from rootfree.placement.homes import Home
from rootfree.placement.local import local, within
from rootfree.placement.placed_tail import PlacedTail
from rootfree.placement.rounds import Round, make_rounds
from rootfree.placement.routes import Places, make_route
from rootfree.rules.momentum import Tail

#: (position of a parameter in its group, rank) of gradients that are missing on some ranks only
Absent = frozenset[tuple[int, int]]

# How many patterns of missing gradients have their routes remembered.
MOST_PATTERNS = 4


class PlacedStack(KernelStack):
    """Gathers the blocks that this rank owns from all ranks, and sends their directions back."""

    def __init__(
        self, params: Sequence[Tensor], homes: Sequence[Home], buckets: list[Bucket[Any]], *,
        dtypes: Sequence[torch.dtype], wide: torch.dtype, where: Sequence[int],
        absent: Callable[[], Absent],
    ) -> None:  # fmt: skip
        """`dtypes`: of each parameter's products; `where`: its position in the group."""
        self.ps, self._homes, self._wide = [*map(local, params)], list(homes), wide
        self._where, self._absent = list(where), absent
        self._ranks = homes[0].ranks
        self._device = self.ps[0].device
        self._rounds = make_rounds(params, homes, buckets, dtypes)
        self.shares: list[Share] = [share for each in self._rounds for share in each.shares]
        kernels = any(share.bucket.plan.kernel is not None for share in self.shares)
        self.numbers = NumberTable(NUMBERS, self._device) if kernels else None
        withins = [within(p) for p in params]
        self._tail = PlacedTail(homes, withins, self._rounds, like=self.ps[0])
        # Views of the local parts of parameters, by box.
        self._parts = {
            (i, box): piece_of(i, view)
            for i, home in enumerate(homes)
            for box, view in home.views(stand_in(shape_of(home.parts[home.ranks.me]))).items()
        }
        self._inward: dict[Absent, list[Exchange]] = {}  # of each round
        self._ways: list[Exchange] = []  # of this step
        self._outward = [self._way_out(each) for each in self._rounds]
        #: of each round: blocks that their owner updates, and where their directions are
        self._stay = [
            [(at, row) for at, row in each.rows.items() if homes[at[0]].at_owner]
            for each in self._rounds
        ]
        self._gs: list[Tensor] = []
        self._us: list[Tensor] = []
        self._directions: dict[tuple[int, Box], Tensor] = {}
        self._coming: Flight | None = None
        self._leaving: Flight | None = None
        self._refresh = True

    def _way_in(self, each: Round, absent: Absent) -> Exchange:
        """Gradients of a round, from the ranks that have them to the owners."""
        homes, ranks, where = self._homes, self._ranks, self._where
        having: dict[int, Places] = {
            i: [(r, box) for r, box in homes[i].held if (where[i], r) not in absent]
            for i in each.owned
        }
        quiet = all(  # every owner has what it needs
            homes[i].is_whole(owner) and (where[i], owner) not in absent
            for i, blocks in each.owned.items()
            for owner, _ in blocks
        )
        route = make_route(having, each.owned, me=ranks.me, world=ranks.world)
        return Exchange(
            route, self._parts, each.rows, dtype=each.dtype, device=self._device,
            group=None if quiet else ranks.group,
        )  # fmt: skip

    def _way_out(self, each: Round) -> Exchange:
        """Directions of a round, from the owners to the ranks that update their parts."""
        held = {i: self._homes[i].held for i in each.owned if not self._homes[i].at_owner}
        ranks = self._ranks
        route = make_route(each.owned, held, me=ranks.me, world=ranks.world)
        # Without holes: what this round does not fill, another one does.
        return Exchange(
            replace(route, holes=[]), each.rows, self._parts, dtype=each.dtype, device=self._device,
            group=ranks.group if held else None,
        )  # fmt: skip

    def gather_(self, gs: list[Tensor], *, squares: bool) -> None:
        """Take the local parts of gradients, in the order of the parameters."""
        absent, self._refresh = self._absent(), squares
        if absent not in self._inward:
            if len(self._inward) >= MOST_PATTERNS:
                self._inward.clear()
            self._inward[absent] = [self._way_in(each, absent) for each in self._rounds]
        self._ways = self._inward[absent]
        self._gs = [g.contiguous() for g in gs]
        self._us = [
            torch.empty(0 if home.at_owner else p.shape, dtype=self._wide, device=self._device)
            for p, home in zip(self.ps, self._homes, strict=True)
        ]
        self._coming, self._leaving = self._begin(0), None

    def _begin(self, number: int) -> Flight | None:
        """Send the gradients of a round, if there is one."""
        if number >= len(self._rounds):
            return None
        return self._ways[number].start(self._gs, self._ranks.traffic, "gradients")

    def parts(self) -> Iterator[Part]:
        """Each share with its gradients, round by round."""
        for number, each in enumerate(self._rounds):
            coming, self._coming = self._coming, self._begin(number + 1)
            stacks = [
                torch.empty(
                    share.blocks, *share.slots[0].tile.sizes, dtype=share.bucket.plan.dtype,
                    device=self._device,
                )
                for share in each.shares
            ]  # fmt: skip
            self._ways[number].keep_(self._gs, stacks)
            if coming is not None:
                coming.land_(stacks)
            for share, G in zip(each.shares, stacks, strict=True):
                limit_(G)
                slabs, rows, sums = share.bucket.slabs, share.rows, None
                if share.bucket.plan.kernel is not None and self._refresh:
                    sums = G.flatten(1).double().square().sum(1, keepdim=True)
                yield Part(share, G, slabs if rows is None else select(slabs, rows), sums)
            self._bring_back(number, stacks)

    def _bring_back(self, number: int, stacks: list[Tensor]) -> None:
        """Receive the directions of the previous round, and send those of this one."""
        if self._leaving is not None:
            self._leaving.land_(self._us)
        way = self._outward[number]
        self._leaving = way.start(stacks, self._ranks.traffic, "directions")
        way.keep_(stacks, self._us)
        for at, piece in self._stay[number]:
            self._directions[at] = piece.of(stacks).to(self._wide)

    def descend_(self, ms: list[Tensor], counters: list[Tensor], tail: Tail) -> None:
        """The tail of the step.  Changes the parameters and ms."""
        if self._leaving is not None:
            self._leaving.land_(self._us)
        with self._unless_skipped([*self.ps, *ms, *counters]):
            self._tail.descend_(self.ps, ms, self._us, self._directions, counters, tail)
        self._gs, self._us, self._directions, self._leaving = [], [], {}, None
