"""Dense oracles: which entries a structure has, one row each. A new structure adds its row here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

# (i, j, d, k) -> label. None: the entry is always zero. Entries of one label are always equal.
Pattern = Callable[[int, int, int, int], Hashable]


def _hierarchical(i: int, j: int, d: int, k: int) -> Hashable:
    if i < k:  # the dense rows on top
        return (i, j)
    if i >= max(k, d - k):  # those at the bottom, which do not reach under the top left block
        return (i, j) if j >= k else None
    return (i, j) if i == j else None


PATTERNS: dict[str, Pattern] = {
    "dense": lambda i, j, d, k: (i, j),
    "diagonal": lambda i, j, d, k: i if i == j else None,
    "block_diagonal": lambda i, j, d, k: (i, j) if i // k == j // k else None,
    "lower_triangular": lambda i, j, d, k: (i, j) if i >= j else None,
    "upper_triangular": lambda i, j, d, k: (i, j) if i <= j else None,
    "hierarchical": _hierarchical,
    "lower_toeplitz": lambda i, j, d, k: i - j if i >= j else None,
    "upper_toeplitz": lambda i, j, d, k: j - i if i <= j else None,
}


@dataclass(frozen=True)
class Oracle:
    """The structure `name` on an axis of size d, by loops over dense float64 entries."""

    name: str
    d: int

    @cached_property
    def groups(self) -> list[list[tuple[int, int]]]:
        """The entries that share one number, number by number."""
        kind, _, k = self.name.partition(":")
        places = defaultdict(list)
        for i in range(self.d):
            for j in range(self.d):
                label = PATTERNS[kind](i, j, self.d, int(k or 0))
                if label is not None:
                    places[label].append((i, j))
        return list(places.values())

    @cached_property
    def index(self) -> Tensor:
        """(d, d): the number of each entry's group; after the last one where it is always zero."""
        index = torch.full((self.d, self.d), len(self.groups))
        for number, places in enumerate(self.groups):
            for i, j in places:
                index[i, j] = number
        return index

    def random(self, b: int, generator: torch.Generator) -> Tensor:
        """(b, d, d) members of the structure near the identity, so that products stay near 1."""
        numbers = torch.randn(b, len(self.groups), dtype=torch.float64, generator=generator)
        numbers = torch.cat([numbers, torch.zeros(b, 1, dtype=torch.float64)], dim=1)
        return torch.eye(self.d, dtype=torch.float64) + 0.5 / self.d**0.5 * numbers[:, self.index]

    def projection(self, M: Tensor) -> Tensor:
        """Π(M), dense, of symmetric M (b, d, d): means over groups; mirrorless entries twice."""
        inside = {place for places in self.groups for place in places}
        out = torch.zeros(M.shape, dtype=torch.float64)
        for b, rows in enumerate(M.double().tolist()):
            numbers = [
                sum(rows[i][j] * (1 if (j, i) in inside else 2) for i, j in places) / len(places)
                for places in self.groups
            ]
            out[b] = torch.tensor([*numbers, 0.0], dtype=torch.float64)[self.index]
        return out

    def basis(self) -> Tensor:
        """(numbers, d, d): an orthonormal basis of the structure."""
        basis = torch.zeros(len(self.groups), self.d, self.d, dtype=torch.float64)
        for number, places in enumerate(self.groups):
            for i, j in places:
                basis[number, i, j] = len(places) ** -0.5
        return basis


@cache
def oracle(name: str, d: int) -> Oracle:
    """The loops run once for each name and size."""
    return Oracle(name, d)
