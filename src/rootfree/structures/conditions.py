"""Estimates of norms and condition numbers of structured factors.

They are for people who watch a run; no rule uses them. Nothing waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rootfree.structures.base import Structure, per_block, wide_dtype

_ITERATIONS = 12
# Elements of dense matrices that are inverted at once.
_AT_ONCE = 2**26
# Multiples of their roots, without the whole part, are spread evenly and repeat in no pattern.
_PRIMES = (2, 3, 5, 7)


def condition(structure: Structure, K: Tensor) -> Tensor:
    """σ_max/σ_min of packed K (b, *packed_shape), from below, (b,); infinite for a singular K.

    Both norms, of K and of K⁻¹, are from below (see `norm_from_below`), up to the rounding of K⁻¹,
    which matters where the condition nears 1/eps. Diagonal matrices are exact.
    """
    count = max(1, _AT_ONCE // structure.d**2)
    return torch.cat([_condition(structure, part) for part in K.split(count)])


def _condition(structure: Structure, K: Tensor) -> Tensor:
    # Of one size, so that neither K⁻¹ nor norms leave the range.
    K = K.to(wide_dtype(K.dtype))
    largest = K.abs().flatten(1).amax(1)
    K = K / per_block(largest, K)
    product = norm_from_below(structure, K) * norm_from_below(structure, structure.inverse(K))
    # Infinite entries of K⁻¹ make NaN of products; those of K itself stay.
    return torch.where(product.isnan() & largest.isfinite(), torch.inf, product)


def norm_from_below(structure: Structure, K: Tensor) -> Tensor:
    """At most ‖K‖₂, (b,), by power iteration on KᵀK.

    For a start with the share s of the leading direction it is at least s^{1/(2q+1)} of ‖K‖₂ after
    q iterations, whatever the other singular values: 0.87 for q = 12 and s = 1/32, the usual share
    of one of 1,024 directions. The best of four starts counts.
    """
    if structure.row_length == 1:  # diagonal
        return K.abs().flatten(1).amax(1)
    largest = K.abs().flatten(1).amax(1).clamp(min=torch.finfo(K.dtype).tiny)
    unit = K / per_block(largest, K)
    places = torch.arange(1, structure.d + 1, dtype=torch.float64, device=K.device)
    starts = [(places * math.sqrt(prime)).frac() - 0.5 for prime in _PRIMES]
    X = torch.stack(starts, 1).to(K.dtype).expand(len(K), -1, -1)
    for _ in range(_ITERATIONS):
        X = structure.apply_transposed(unit, structure.apply(unit, _normalised(X)))
    found = structure.apply(unit, _normalised(X))
    norm: Tensor = largest * torch.linalg.vector_norm(found, dim=1).amax(1)
    return norm


def _normalised(X: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(X, dim=1, keepdim=True)
    return X / norms.clamp(min=torch.finfo(X.dtype).tiny)


def unit_diagonal(S: Tensor) -> Tensor:
    """D^{-½} S D^{-½} with D the diagonal of S (b, d, d): all that a diagonal can do for it."""
    scale = S.diagonal(dim1=-2, dim2=-1).rsqrt()
    return scale.unsqueeze(-1) * S * scale.unsqueeze(-2)
