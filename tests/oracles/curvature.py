"""The kinds of curvature H of the specification, each as a dense D x D matrix, undamped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oracles.kronecker import Array, kron_all


def gradient_outer_product(grad: Array, batch_size: float) -> Array:
    """H = B g gᵀ, g the gradient of a loss that averages B terms."""
    g = grad.reshape(-1)
    return batch_size * np.outer(g, g)


def sum_of_outer_products(vectors: Array) -> Array:
    """H = Σ_r v_r v_rᵀ for vectors of shape (r, d_1..d_N); any scaling is inside the vectors."""
    total = np.zeros((vectors[0].size, vectors[0].size))
    for vector in vectors:
        total += np.outer(vector.reshape(-1), vector.reshape(-1))
    return total


def kronecker(factors: Sequence[Array]) -> Array:
    """H = H_1 x ... x H_N (KFAC: output-gradient factor x input factor)."""
    return kron_all(factors)


def diagonal(entries: Array) -> Array:
    """H = diag(h), h shaped like the parameter."""
    return np.diag(entries.reshape(-1))
