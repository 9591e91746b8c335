"""Kronecker factors over one view of a parameter, restricted to blocks of another view.

A parameter of 24 elements may be preconditioned as (2, 3, 4) while its curvature is a product over
(6, 4) or (2, 12): both lists are cut where their running products meet, (2, 3 | 4) against (6 | 4).
Between two cuts the curvature is one matrix over the axes of the preconditioner there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rootfree.blocks import Tile
from rootfree.curvature.kronecker import KroneckerCurvature


@dataclass(frozen=True)
class Part:
    """Curvature over some neighbouring axes of a stack of blocks, whose sizes have product D.

    U: (b, D, D), or (b, D) where it is diagonal.
    """

    axes: tuple[int, ...]
    U: Tensor

    @property
    def is_diagonal(self) -> bool:
        """Whether U is the diagonal of a matrix."""
        return self.U.dim() == 2


def regroup(view: Sequence[int], axes: Sequence[int]) -> list[tuple[range, range]]:
    """Positions in two factorisations of a number, cut wherever their running products meet.

    >>> regroup((2, 3, 4), (6, 4))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 2))]
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
        # Axes of size one belong to what is before them.
        while j < len(axes) and axes[j] == 1:
            j += 1
        while i < len(view) and view[i] == 1:
            i += 1
        groups.append((range(first_i, i), range(first_j, j)))
    return groups


def parts_of(H: KroneckerCurvature, tile: Tile, *, dtype: torch.dtype) -> list[Part]:
    """The restriction of H to every block of a tile: diagonal sub-blocks of the regrouped factors.

    Exact: the entries of a Kronecker product are products of entries.
    """
    parts = []
    for ns, ms in regroup(tile.view, H.axes):
        factors = [H.factors[m].to(dtype) for m in ms]
        blocks = [1] * len(tile.counts)  # the blocks along these axes; the others repeat them
        for n in ns:
            blocks[n] = tile.counts[n]
        uncut = all(tile.sizes[n] == tile.view[n] for n in ns)
        if uncut and len(factors) == 1:
            U = factors[0].unsqueeze(0)
        else:
            U = _entries(factors, _places(tile, ns, factors[0].device))
        U = U.view(*blocks, *U.shape[1:]).expand(*tile.counts, *U.shape[1:])
        parts.append(Part(tuple(ns), U.reshape(tile.blocks, *U.shape[len(blocks) :])))
    return parts


def _places(tile: Tile, ns: range, device: torch.device) -> Tensor:
    """Flat places of the elements of each block along the axes ns: (blocks, elements)."""
    places = torch.zeros((), dtype=torch.long, device=device)
    for n in ns:
        start, count, size = tile.starts[n], tile.counts[n], tile.sizes[n]
        along = torch.arange(start, start + count * size, device=device).view(count, size)
        # (blocks, 1, elements, 1) and (1, count, 1, size): the later axis varies faster
        places = places.view(-1, 1, places.shape[-1] if places.dim() else 1, 1) * tile.view[n]
        places = (places + along[:, None, :]).flatten(2).flatten(0, 1)
    return places


def _entries(factors: Sequence[Tensor], places: Tensor) -> Tensor:
    """⊗ of the factors at places (c, D): (c, D, D), or (c, D) if every factor is diagonal."""
    sizes = [U.shape[0] for U in factors]
    diagonal = all(U.dim() == 1 for U in factors)
    product: Tensor | None = None
    for m, U in enumerate(factors):
        i = places // math.prod(sizes[m + 1 :]) % sizes[m]
        if diagonal:
            entries = U[i]
        elif U.dim() == 1:
            entries = U[i].unsqueeze(2) * (i.unsqueeze(2) == i.unsqueeze(1))
        else:
            entries = U[i.unsqueeze(2), i.unsqueeze(1)]
        product = entries if product is None else product * entries
    assert product is not None
    return product
