"""The tail of a step on many ranks: from directions to parameters.

Every rank updates its part of a parameter. Or the owners of its blocks update them, and send the
updated blocks to the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rootfree.kernels.rounding import Within, widened
from rootfree.placement.boxes import Box, whole
from rootfree.placement.exchange import Exchange, Flight, Pieces, piece_of, stand_in
from rootfree.placement.homes import Home
from rootfree.placement.norms import PlacedNorms
from rootfree.placement.rounds import Owned, Round
from rootfree.placement.routes import make_route
from rootfree.rules.momentum import Tail, descend_


class PlacedTail:
    """Updates this rank's parts of parameters, or the blocks that it owns."""

    def __init__(
        self, homes: Sequence[Home], withins: Sequence[Within | None], rounds: Sequence[Round], *,
        like: Tensor,
    ) -> None:  # fmt: skip
        """`withins`: the positions of the local parts in the whole; `like`: a local part."""
        self._homes, self._ranks, self._device = list(homes), homes[0].ranks, like.device
        #: where blocks are in parameters that the owners of their blocks update
        self._blocks: Pieces = {
            (i, box): piece_of(i, stand_in(home.view)).part(whole(home.view), box)
            for i, home in enumerate(homes)
            if home.at_owner
            for _, box in home.owned
        }
        # Of each piece that this rank updates: the parameter, and its position in it.
        self._of: list[int] = []
        self._withins: list[Within | None] = []
        for i, home in enumerate(homes):
            mine: list[Within | None] = [withins[i]]
            if home.at_owner:
                starts = [tuple(start for start, _ in box) for box in home.my_boxes]
                mine = [Within(start, home.view) for start in starts]
            self._of += [i] * len(mine)
            self._withins += mine
        self._rms = PlacedNorms(homes, self._of, self._ranks, self._device)
        owned = [
            {i: places for i, places in each.owned.items() if homes[i].at_owner} for each in rounds
        ]
        self._updates = [self._update(each, like.dtype) for each in owned if each]

    def _update(self, owned: Owned, dtype: torch.dtype) -> Exchange:
        """Updated blocks of a round, from their owner to all other ranks."""
        ranks = self._ranks
        others = [rank for rank in range(ranks.world) if rank != ranks.me]
        wanted = {
            i: [
                (rank, box)
                for owner, box in blocks
                for rank in (others if owner == ranks.me else [ranks.me])
            ]
            for i, blocks in owned.items()
        }
        route = make_route(owned, wanted, me=ranks.me, world=ranks.world)
        return Exchange(
            route, self._blocks, self._blocks, dtype=dtype, device=self._device, group=ranks.group
        )

    def descend_(
        self, here: list[Tensor], ms: list[Tensor], us: list[Tensor],
        directions: Mapping[tuple[int, Box], Tensor], counters: list[Tensor], tail: Tail,
    ) -> None:  # fmt: skip
        """The tail.  Changes the local parts `here` of the parameters, and ms.

        `us`: directions of the local parts; `directions`: of blocks, by parameter and box.
        """
        flat = [p.contiguous() for p in here]  # itself, where it is
        ps, moments, steps = list[Tensor](), list[Tensor](), list[Tensor]()
        for i, home in enumerate(self._homes):
            if home.at_owner:
                ps += [self._blocks[i, box].of(flat) for box in home.my_boxes]
                steps += [directions[i, box] for box in home.my_boxes]
                moments += home.segments(ms[i]).values() if ms else ()
            else:
                ps.append(here[i])
                steps.append(us[i])
                moments += ms[i : i + 1]
        self._descend_(ps, moments, steps, us[0].dtype, counters, tail)
        flight: Flight | None = None
        for update in self._updates:  # one travels while the next is packed
            before, flight = flight, update.start(flat, self._ranks.traffic, "parameters")
            if before is not None:
                before.land_(flat)
        if flight is not None:
            flight.land_(flat)
        for i, home in enumerate(self._homes):
            if home.at_owner and flat[i] is not here[i]:
                here[i].copy_(flat[i])

    def _descend_(
        self, ps: list[Tensor], ms: list[Tensor], us: list[Tensor], wide: torch.dtype,
        counters: list[Tensor], tail: Tail,
    ) -> None:  # fmt: skip
        if not ps:  # other ranks wait for this one's part of the norms all the same
            none = torch.empty(0, dtype=wide, device=self._device)
            descend_([none], [none.clone()], [none.clone()], tail, rms=self._rms)
        elif not ms or ms[0].dtype == wide:
            descend_(ps, ms, us, tail, rms=self._rms)
        else:
            # Blocks of one parameter share its counter, which advances once.
            mine = [counters[i].clone() for i in self._of] if counters else []
            with widened(ms, wide, mine, self._withins) as wider:
                descend_(ps, wider, us, tail, rms=self._rms)
        if counters:
            torch._foreach_add_(counters, 1)
