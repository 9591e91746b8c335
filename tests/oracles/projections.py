"""Structured factors (8) as functions from a dense symmetric tangent h to a dense structured one.

For a structure with matrices X, the projected P(h) is the X whose symmetric part is the orthogonal
projection of h on {(Y + Yᵀ)/2 : Y in the structure}: entries whose mirror image lies outside the
structure count twice. `names` of the oracles' `structures`:

    dense, diagonal, block_diagonal:k, lower_triangular, upper_triangular,
    lower_toeplitz, upper_toeplitz, hierarchical:k1,k2
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from oracles.kronecker import Array

Projection = Callable[[Array], Array]


def support(name: str, d: int) -> Array:
    """Boolean d x d: which entries a structure may fill."""
    kind, _, argument = name.partition(":")
    mask = np.zeros((d, d), dtype=bool)
    k1, k2 = _borders(argument, d) if kind == "hierarchical" else (0, 0)
    for i in range(d):
        for j in range(d):
            if kind == "dense":
                inside = True
            elif kind == "diagonal":
                inside = i == j
            elif kind == "block_diagonal":
                inside = i // int(argument) == j // int(argument)
            elif kind in ("lower_triangular", "lower_toeplitz"):
                inside = i >= j
            elif kind in ("upper_triangular", "upper_toeplitz"):
                inside = i <= j
            elif kind == "hierarchical":
                # rows 0..k1: full; rows k1..d-k2: the diagonal; last k2 rows: all but the first k1
                inside = i == j or i < k1 or (i >= d - k2 and j >= k1)
            else:
                raise ValueError(f"unknown structure {name!r}")
            mask[i, j] = inside
    return mask


def _borders(argument: str, d: int) -> tuple[int, int]:
    """k1, k2 of a hierarchical structure, cut where d is too small: k1 first."""
    k1, k2 = (int(part) for part in argument.split(","))
    k1 = min(k1, d)
    return k1, min(k2, d - k1)


def projection(name: str) -> Projection:
    """P of the named structure."""

    def project(h: Array) -> Array:
        d = len(h)
        mask = support(name, d)
        out = np.zeros((d, d))
        for i in range(d):
            for j in range(d):
                if mask[i, j]:
                    out[i, j] = h[i, j] if mask[j, i] else 2 * h[i, j]
        if name.endswith("toeplitz"):
            for offset in range(-d + 1, d):
                band = [(i, i + offset) for i in range(d) if 0 <= i + offset < d]
                mean = sum(out[i, j] for i, j in band) / len(band)
                for i, j in band:
                    out[i, j] = mean
        return out

    return project
