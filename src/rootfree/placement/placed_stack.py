"""The blocks of a step on many ranks: pieces of gradients go to the owners, directions come back.

The interface is that of `kernels/stack.py`. Gradients and directions travel in the dtype of the
products: nothing is lost that would not be lost there. Directions are made by kernels where there
are kernels for them; torch functions do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rootfree.kernels.rounding import Within, widened
from rootfree.kernels.stack import Part, Share
from rootfree.kernels.tables import NUMBERS, SKIP, NumberTable, send_numbers
from rootfree.layout.buckets import Bucket, put_back_, select
from rootfree.placement.boxes import Box, part, shape_of, whole
from rootfree.placement.exchange import Exchange, Shadow, Shadows, piece_of, stand_in
from rootfree.placement.homes import Home, tile_number
from rootfree.placement.local import local, within
from rootfree.placement.norms import PlacedNorms
from rootfree.placement.routes import Places, make_route
from rootfree.rules.momentum import Tail, descend_

#: (position of a parameter in its group, rank) of gradients that are missing on some ranks only
Absent = frozenset[tuple[int, int]]

# Patterns of missing gradients whose routes are remembered.
MOST_PATTERNS = 4


class PlacedStack:
    """Gathers blocks that are owned here from all ranks, and brings their directions back."""

    def __init__(
        self, params: Sequence[Tensor], homes: Sequence[Home], buckets: list[Bucket[Any]], *,
        dtypes: Sequence[torch.dtype], wide: torch.dtype, where: Sequence[int],
        absent: Callable[[], Absent],
    ) -> None:  # fmt: skip
        """`dtypes`: of each parameter's products; `where`: its position in the group."""
        self.ps, self._homes, self._dtypes, self._wide = [*map(local, params)], homes, dtypes, wide
        self._where, self._absent = list(where), absent
        self._ranks = homes[0].ranks
        self._device = local(params[0]).device
        members = {p: i for i, p in enumerate(params)}
        self.shares: list[Share] = []
        #: of each share: parameter and box of every block
        self._blocks: list[list[tuple[int, Box]]] = []
        for bucket in buckets:
            found = [n for n, slot in enumerate(bucket.slots) if slot.p in members]
            if found:
                slots = [bucket.slots[n] for n in found]
                rows = None if len(found) == len(bucket.slots) else bucket.rows_of(found)
                boxes = [
                    (members[slot.p], homes[members[slot.p]].blocks[tile][number])
                    for slot in slots
                    for tile in [tile_number(slot.prefix)]
                    for number in homes[members[slot.p]].mine(tile)
                ]
                self.shares.append(Share(bucket, slots, rows, len(boxes)))
                self._blocks.append(boxes)
        kernels = any(share.bucket.plan.kernel is not None for share in self.shares)
        self.numbers = NumberTable(NUMBERS, self._device) if kernels else None
        self._norms = PlacedNorms(self._homes, self._ranks, self._device)
        self._inward: dict[Absent, list[Exchange]] = {}
        # Shapes of what a step has: parts of the parameters, stacks of the blocks owned here.
        self._parts = {
            (i, box): Shadow(i, view)
            for i, home in enumerate(homes)
            for box, view in home.views(stand_in(shape_of(home.parts[home.ranks.me]))).items()
        }
        self._rows = {
            at: Shadow(n, stand_in((len(blocks), *share.slots[0].tile.sizes))[row])
            for n, (share, blocks) in enumerate(zip(self.shares, self._blocks, strict=True))
            for row, at in enumerate(blocks)
        }
        kept = [i for i, home in enumerate(homes) if not home.at_owner]
        owned = {i: home.owned for i, home in enumerate(homes)}
        held = {i: homes[i].held for i in kept}
        self._outward = self._exchanges(owned, held, self._rows, self._parts, dtypes)
        # Updated blocks go to everybody else; their owner has them in place.
        blocks = {
            (i, box): Shadow(i, part(stand_in(home.view), whole(home.view), box))
            for i, home in enumerate(homes)
            if home.at_owner
            for _, box in home.owned
        }
        everybody = range(self._ranks.world)
        others = {
            i: [(r, box) for owner, box in home.owned for r in everybody if r != owner]
            for i, home in enumerate(homes)
            if home.at_owner
        }
        self._updates = self._exchanges(owned, others, blocks, blocks, [p.dtype for p in params])
        #: of each parameter: what is updated here, if its blocks are: the block, its direction
        self._mine = [
            {
                box: (
                    piece_of(blocks[i, box]),
                    piece_of(self._rows[i, box]),
                    Within(tuple(start for start, _ in box), home.view),
                )
                for box in home.my_boxes
            }
            if home.at_owner
            else {}
            for i, home in enumerate(homes)
        ]
        self._withins = [within(p) for p in params]
        self._stacks: list[Tensor] = []
        self._refresh = True
        self.skip: Tensor | None = None  # on the device: not 0 where nothing may change

    def _exchanges(
        self, sources: Mapping[int, Places], targets: Mapping[int, Places], have: Shadows,
        want: Shadows, dtypes: Sequence[torch.dtype],
    ) -> list[Exchange]:  # fmt: skip
        """One exchange for each dtype, in an order that is the same on all ranks."""
        found, ranks = [], self._ranks
        for dtype in sorted({dtypes[i] for i in targets}, key=str):
            mine = {i: places for i, places in targets.items() if dtypes[i] == dtype}
            route = make_route(sources, mine, me=ranks.me, world=ranks.world)
            device, group = self._device, ranks.group
            found.append(Exchange(route, have, want, dtype=dtype, device=device, group=group))
        return found

    def send(self, tail: Tail, rates: tuple[float, ...]) -> None:
        """Bring hyper-parameters to where the kernels of the directions read them."""
        if self.numbers is not None:
            send_numbers(self.numbers, tail, rates)

    def tell(self, skip: Tensor | None) -> None:
        """Whether this step may change anything; None: it may.  Call after `send`."""
        self.skip = skip
        if skip is not None and self.numbers is not None:
            self.numbers.tensor[SKIP].copy_(skip)

    def gather_(self, gs: list[Tensor], *, squares: bool) -> None:
        """Take the local parts of gradients in the order of the parameters."""
        absent, self._refresh = self._absent(), squares
        if absent not in self._inward:
            having = {
                i: [(r, box) for r, box in home.held if (self._where[i], r) not in absent]
                for i, home in enumerate(self._homes)
            }
            owned = {i: home.owned for i, home in enumerate(self._homes)}
            if len(self._inward) >= MOST_PATTERNS:
                self._inward.clear()
            self._inward[absent] = self._exchanges(
                having, owned, self._parts, self._rows, self._dtypes
            )
        self._stacks = [
            torch.empty(
                share.blocks, *share.slots[0].tile.sizes, dtype=share.bucket.plan.dtype,
                device=self._device,
            )
            for share in self.shares
        ]  # fmt: skip
        gs = [g.contiguous() for g in gs]
        for exchange in self._inward[absent]:
            exchange(gs, self._stacks, self._ranks.sent, "gradients")

    def run(self, kind: tuple[Hashable, ...], work: Callable[[], None]) -> None:
        """Do work on the parts."""
        work()

    def release(self) -> None:
        """Nothing is recorded here."""

    def parts(self) -> Iterator[Part]:
        """Each share with its gradients."""
        for share, G in zip(self.shares, self._stacks, strict=True):
            slabs, rows, sums = share.bucket.slabs, share.rows, None
            if share.bucket.plan.kernel is not None and self._refresh:
                sums = G.flatten(1).double().square().sum(1, keepdim=True)
            yield Part(share, G, slabs if rows is None else select(slabs, rows), sums)

    def keep_(self, part: Part, *, refresh: bool) -> None:
        """Take the directions of a part, and with `refresh` its changed state."""
        if part.share.rows is not None and refresh:
            put_back_(part.share.bucket.slabs, part.share.rows, part.state)

    def descend_(self, ms: list[Tensor], counters: list[Tensor], tail: Tail) -> None:
        """The tail of the step.  Changes the parameters and ms."""
        here = self.ps
        us = [torch.empty(p.shape, dtype=self._wide, device=self._device) for p in here]
        for exchange in self._outward:
            exchange(self._stacks, us, self._ranks.sent, "directions")
        flat = [p if p.is_contiguous() else p.contiguous() for p in here]
        pieces = _Pieces(self._device, self._wide)
        for i, home in enumerate(self._homes):
            m = ms[i] if ms else None
            if not home.at_owner:
                pieces.add(i, here[i], m, us[i], self._withins[i])
                continue
            segments = home.segments(m) if m is not None else {}
            for box, (p, u, where) in self._mine[i].items():
                direction = u.of(self._stacks).to(self._wide)
                pieces.add(i, p.of(flat), segments.get(box), direction, where)
        pieces.descend_(tail, self._norms, counters)
        for exchange in self._updates:
            exchange(flat, flat, self._ranks.sent, "parameters")
        for i, home in enumerate(self._homes):
            if home.at_owner and flat[i] is not here[i]:
                here[i].copy_(flat[i])
        self._stacks = []


class _Pieces:
    """What the tail works on here: parameters, or their blocks where these are owned."""

    def __init__(self, device: torch.device, wide: torch.dtype) -> None:
        self._none = torch.empty(0, dtype=wide, device=device)
        self._wide = wide
        self._of: list[int] = []
        self._ps: list[Tensor] = []
        self._ms: list[Tensor] = []
        self._us: list[Tensor] = []
        self._withins: list[Within | None] = []

    def add(self, i: int, p: Tensor, m: Tensor | None, u: Tensor, where: Within | None) -> None:
        self._of.append(i)
        self._ps.append(p)
        self._us.append(u)
        self._ms += [] if m is None else [m]
        self._withins.append(where)

    def descend_(self, tail: Tail, norms: PlacedNorms, counters: list[Tensor]) -> None:
        of, ps, ms, us = self._of, self._ps, self._ms, self._us
        if not ps:  # nothing is here, but the others wait for our part of the norms
            none = self._none
            descend_([none], [none.clone()], [none.clone()], tail, rms=norms.of([]))
        elif not ms or ms[0].dtype == self._wide:
            descend_(ps, ms, us, tail, rms=norms.of(of))
        else:
            # Blocks of one parameter share its counter, which advances once.
            mine = [counters[i].clone() for i in of] if counters else []
            with widened(ms, self._wide, mine, self._withins) as wide:
                descend_(ps, wide, us, tail, rms=norms.of(of))
        if counters:
            torch._foreach_add_(counters, 1)
