"""Root mean squares of parameters whose parts are on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rootfree.placement.boxes import Box, size_of, whole
from rootfree.placement.homes import Home
from rootfree.placement.ranks import Ranks


class PlacedNorms:
    """Reduces one vector with the sums of squares of all parts, and adds them in a fixed order.

    Every rank gets the same bits, whatever parts it has.
    """

    def __init__(
        self, homes: Sequence[Home], pieces: Sequence[int], ranks: Ranks, device: torch.device
    ) -> None:
        """`pieces`: the parameter of each piece on this rank, in the order of their parts."""
        self._ranks, self._device = ranks, device
        parts = [_summed_parts(home) for home in homes]
        self._parts = sum(map(len, parts))
        #: numbers of the parts of each parameter, padded with the number of a zero
        shape = (len(homes), max(map(len, parts), default=0))
        table = torch.full(shape, self._parts, device="cpu")
        mine = []  # of each parameter: numbers of the parts that are summed here
        start = 0
        for i, each in enumerate(parts):
            table[i, : len(each)] = torch.arange(start, start + len(each), device="cpu")
            mine.append(iter([n for n, (_, rank) in enumerate(each, start) if rank == ranks.me]))
            start += len(each)
        numbers = [next(mine[i], None) for i in pieces]  # None: another rank sums this copy
        self._summed = [k for k, number in enumerate(numbers) if number is not None]
        places = [number for number in numbers if number is not None]
        sizes = [float(size_of(whole(home.shape))) for home in homes]
        self._places = torch.tensor(places, dtype=torch.int64).to(device)
        self._order = torch.tensor(pieces, dtype=torch.int64).to(device)
        self._table = table.to(device)
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=device)

    def __call__(self, pieces: list[Tensor]) -> Tensor:
        """For each piece, the RMS of the parameter that it is part of. All ranks must ask."""
        sums = torch.zeros(self._parts + 1, dtype=torch.float64, device=self._device)
        if self._summed:
            norms = torch._foreach_norm([pieces[k] for k in self._summed], dtype=torch.float64)
            sums[self._places] = torch.stack(norms).square()
        self._ranks.sum_(sums)
        roots = (sums[self._table].sum(1) / self._sizes).sqrt()
        return roots[self._order] if len(self._order) else roots.new_ones(1)


def _summed_parts(home: Home) -> list[tuple[Box, int]]:
    """The parts of a parameter, each with the rank that sums its squares: of copies the first."""
    copies = home.owned if home.at_owner else [*enumerate(home.parts)]
    first = {box: rank for rank, box in reversed(copies) if size_of(box) > 0}
    return [*reversed(first.items())]
