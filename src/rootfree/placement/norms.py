"""Root mean squares of parameters whose parts are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rootfree.placement.boxes import Box, size_of, whole
from rootfree.placement.homes import Home
from rootfree.placement.ranks import Ranks


class PlacedNorms:
    """Sums of squares of parts, one reduced vector, added in an order that all ranks share."""

    def __init__(self, homes: Sequence[Home], ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        #: of each parameter: its parts, with the rank that sums their squares; of copies the first
        entries: list[list[tuple[Box, int]]] = []
        for home in homes:
            copies = (
                [(owner, box) for owner, box in home.owned]
                if home.at_owner
                else [*enumerate(home.parts)]
            )
            first = {box: rank for rank, box in reversed(copies) if size_of(box) > 0}
            entries.append([*reversed(first.items())])
        self._entries = sum(map(len, entries))
        #: numbers of the parts of each parameter; those that it lacks are the number of a zero
        table = torch.full((len(homes), max(map(len, entries), default=0)), self._entries)
        self._mine: list[list[int]] = []  # numbers of the parts that are summed here
        start = 0
        for i, parts in enumerate(entries):
            table[i, : len(parts)] = torch.arange(start, start + len(parts))
            self._mine.append([start + n for n, (_, rank) in enumerate(parts) if rank == ranks.me])
            start += len(parts)
        sizes = [float(size_of(whole(home.shape))) for home in homes]
        self._table = table.to(device)
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=device)
        self._known: dict[tuple[int, ...], Callable[[list[Tensor]], Tensor]] = {}

    def of(self, pieces: Sequence[int]) -> Callable[[list[Tensor]], Tensor]:
        """The function that gives, for each piece, the RMS of the parameter that it is part of.

        `pieces`: the parameters of the pieces that are here, in the order of their parts.
        """
        key = tuple(pieces)
        if key not in self._known:
            left = [iter(numbers) for numbers in self._mine]
            numbers = [next(left[i], None) for i in pieces]
            summed = [k for k, number in enumerate(numbers) if number is not None]
            places = torch.tensor([n for n in numbers if n is not None], dtype=torch.int64)
            order = torch.tensor(pieces, dtype=torch.int64).to(self._device)
            self._known[key] = partial(self._rms, order, summed, places.to(self._device))
        return self._known[key]

    def _rms(
        self, order: Tensor, summed: list[int], places: Tensor, pieces: list[Tensor]
    ) -> Tensor:
        sums = torch.zeros(self._entries + 1, dtype=torch.float64, device=self._device)
        if summed:
            norms = torch._foreach_norm([pieces[k] for k in summed], dtype=torch.float64)
            sums[places] = torch.stack(norms).square()
        self._ranks.sum_(sums)
        roots = (sums[self._table].sum(1) / self._sizes).sqrt()
        return roots[order] if len(order) else roots.new_ones(1)
