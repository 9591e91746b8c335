"""Kronecker factors over one view of a parameter, seen over another view.

A parameter of 24 elements may be preconditioned as (2, 3, 4) while its curvature is a product over
(6, 4) or (2, 12): both lists are cut where their running products meet, (2, 3 | 4) against (6 | 4).
Between two cuts the curvature is one matrix over the axes of the preconditioner there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from rootfree.layout.tiles import Tile

Groups = tuple[tuple[range, range], ...]


@lru_cache(maxsize=1024)
def regroup(view: tuple[int, ...], axes: tuple[int, ...]) -> Groups:
    """Positions in two factorisations of a number, cut wherever their running products meet.

    >>> regroup((2, 3, 4), (6, 4))
    ((range(0, 2), range(0, 1)), (range(2, 3), range(1, 2)))
    """
    groups = []
    i = j = 0
    while i < len(view) or j < len(axes):
        first_i, first_j = i, j
        ours = theirs = 1
        while i == first_i or j == first_j or ours != theirs:
            if i == first_i or (j > first_j and ours < theirs):
                ours, i = ours * view[i], i + 1
            else:
                theirs, j = theirs * axes[j], j + 1
        # Axes of size one belong to what is before them; a view has none.
        while j < len(axes) and axes[j] == 1:
            j += 1
        groups.append((range(first_i, i), range(first_j, j)))
    return tuple(groups)


def places_of(tile: Tile, ns: range, device: torch.device) -> Tensor:
    """Flat places of the elements of each block along the axes ns: (blocks, elements)."""
    places = torch.zeros((), dtype=torch.long, device=device)
    for n in ns:
        start, count, size = tile.starts[n], tile.counts[n], tile.sizes[n]
        along = torch.arange(start, start + count * size, device=device).view(count, size)
        # (blocks, 1, elements, 1) and (1, count, 1, size): the later axis varies faster
        places = places.view(-1, 1, places.shape[-1] if places.dim() else 1, 1) * tile.view[n]
        places = (places + along[:, None, :]).flatten(2).flatten(0, 1)
    return places


def entries_at(factors: Sequence[Tensor], places: Tensor) -> Tensor:
    """⊗ of the factors (k, d, d) at places (c, D): (k, c, D, D), or (k, c, D) for diagonal ones."""
    sizes = [U.shape[1] for U in factors]
    diagonal = all(U.dim() == 2 for U in factors)
    product: Tensor | None = None
    for m, U in enumerate(factors):
        i = places // math.prod(sizes[m + 1 :]) % sizes[m]
        if diagonal:
            entries = U[:, i]
        elif U.dim() == 2:
            entries = U[:, i].unsqueeze(3) * (i.unsqueeze(2) == i.unsqueeze(1))
        else:
            entries = U[:, i.unsqueeze(2), i.unsqueeze(1)]
        product = entries if product is None else product * entries
    assert product is not None
    return product
