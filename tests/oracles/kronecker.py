"""Dense Kronecker algebra: the slow definitions that the oracles share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

Array = np.ndarray


def squeeze(tensor: Array) -> Array:
    """Drop the axes of size one; what has none left is one axis of size one."""
    kept = [d for d in tensor.shape if d != 1]
    return tensor.reshape(kept if kept else [1])


def kron_all(factors: Sequence[Array]) -> Array:
    """F_1 x F_2 x ... x F_N, the matrix that acts on the row-major vec of a tensor."""
    out = np.eye(1)
    for factor in factors:
        out = np.kron(out, factor)
    return out


def apply(matrix: Array, tensor: Array) -> Array:
    """Mat · vec(G), shaped like G."""
    return np.asarray(matrix @ tensor.reshape(-1)).reshape(tensor.shape)


def partial_trace(matrix: Array, dims: Sequence[int], keep: int) -> Array:
    """T[a, b] = sum over all i_j, j != keep, of M[(..i_j..a..), (..i_j..b..)].

    Entry by entry: every multi-index of the other axes is enumerated.
    """
    d = dims[keep]
    out = np.zeros((d, d))
    others = [1 if j == keep else dim for j, dim in enumerate(dims)]
    for index in np.ndindex(*others):
        flat = []
        for a in range(d):
            full = list(index)
            full[keep] = a
            flat.append(np.ravel_multi_index(full, tuple(dims)))
        out += matrix[np.ix_(flat, flat)]
    return out


def others_size(dims: Sequence[int], n: int) -> int:
    """D_{-n}: the product of all axes but n."""
    return prod(d for j, d in enumerate(dims) if j != n)
