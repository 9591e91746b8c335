"""Inverse roots of symmetric positive semi-definite matrices, and blocks of tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor


def inverse_root(S: Tensor, order: int, *, damping: float, dtype: torch.dtype) -> Tensor:
    """(S + λI)^{-1/order}, by eigendecomposition in `dtype`, returned in the dtype of S.

    With λ = 0 eigenvalues at the level of rounding are taken for zeros, and the root is that of the
    pseudo-inverse: no gradient has had a part in those directions yet.
    """
    wide = S.to(dtype)
    try:
        values, vectors = torch.linalg.eigh(wide)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # The solvers fail on some ill-conditioned matrices in float32 (all on non-finite ones).
        values, vectors = torch.linalg.eigh(S.double())
    values = values.clamp(min=0) + damping
    powers = values.pow(-1 / order)
    if damping == 0:
        noise = torch.finfo(S.dtype).eps * len(values) * values.max()
        powers = torch.where(values > noise, powers, 0.0)
    root: Tensor = (vectors * powers) @ vectors.mT
    return root.to(S.dtype)


def gram(G: Tensor, axis: int) -> Tensor:
    """G₍ₙ₎G₍ₙ₎ᵀ: the sum of the outer products of the fibres along an axis."""
    unfolded = G.movedim(axis, 0).flatten(1) if G.dim() > 1 else G[:, None]
    return unfolded @ unfolded.mT


def apply_on_axes(G: Tensor, matrices: Iterable[Tensor]) -> Tensor:
    """G with the matrix n applied on axis n."""
    for axis, M in enumerate(matrices):
        G = torch.tensordot(M, G, dims=([1], [axis])).movedim(0, axis)
    return G


def merged_shape(shape: tuple[int, ...], block_size: int | None) -> tuple[int, ...]:
    """The axes that get a factor: none of size one, input axes merged up to the block size."""
    axes = [d for d in shape if d > 1] or [1]
    if block_size is None:
        return tuple(axes)
    merged = axes[:1]
    for d in axes[1:]:
        if len(merged) > 1 and merged[-1] * d <= block_size:
            merged[-1] *= d
        else:
            merged.append(d)
    return tuple(merged)


def block_slices(shape: tuple[int, ...], block_size: int | None) -> list[tuple[slice, ...]]:
    """The blocks of a tensor: axes longer than the block size are cut into nearly equal pieces."""
    per_axis = []
    for d in shape:
        pieces = 1 if block_size is None else math.ceil(d / block_size)
        ends = [d * i // pieces for i in range(pieces + 1)]
        per_axis.append([slice(a, b) for a, b in itertools.pairwise(ends)])
    return list(itertools.product(*per_axis))
