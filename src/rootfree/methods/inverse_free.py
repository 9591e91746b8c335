"""Inverse-free factors on a stack of blocks, as IFShampoo and IFFullAdagrad have them.

The rule is in rules/if_shampoo.py; here are the precisions around it. Products run in the dtype of
G (bf16 on CUDA), factors and tangent vectors are accumulated in fp32 or wider. In bfloat16, which
may hold the factors to save memory, they are rounded stochastically: rounded to nearest, a factor
would not move at all at the usual step sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature, OuterProducts
from rootfree.curvature.stacking import MixedCurvature
from rootfree.kernels.plan import Group, State, Structures
from rootfree.kernels.rounding import stochastic_round_
from rootfree.layout.tiles import Tile
from rootfree.rules import LEAST_DAMPING, if_shampoo
from rootfree.shell.parameter_state import rounding_counters, working_dtype
from rootfree.structures import Structure, frobenius_norm, per_block
from rootfree.structures.base import in_float16, wide_dtype


def factor_state(
    p: Tensor, tile: Tile, structures: Structures, group: Group, *, salt: int
) -> State:
    """Kₙ = init_scale·I; with Riemannian momentum mₙ = 0; state of the start and of rounding."""
    b, wide, device = tile.blocks, working_dtype(p), p.device
    dtype = torch.float64 if wide == torch.float64 else group["factor_dtype"] or wide
    start = group.get("init_scale", "gradient")
    scale = 1.0 if start == "gradient" else start
    state: State = {}
    for n, structure in enumerate(structures):
        state[f"factor{n}"] = structure.identity(b, dtype=dtype, device=device) * scale
        if group.get("riemannian_momentum", 0.0) > 0:
            state[f"tangent{n}"] = torch.zeros_like(state[f"factor{n}"], dtype=wide)
    if start == "gradient":
        state["started"] = torch.zeros(b, dtype=torch.bool, device=device)
    if dtype == torch.bfloat16:
        state["rounding"] = rounding_counters((b,), salt=salt, device=device)
    return state


def direction(
    group: Group, structures: Structures, state: State, G: Tensor, H: BlockCurvature | None
) -> Tensor:
    """U of a stack of gradients G; the factors first move by H, if there is one.  Changes state."""
    half = group["matmul_dtype"] == torch.float16 and G.dtype != torch.float64
    dtype = torch.float16 if half else G.dtype
    if H is not None:
        _refresh_(group, structures, state, H, G.shape[1:], dtype)
    Ks, scales = operands(structures, state, dtype)
    if not half:
        return if_shampoo.precondition(G, Ks, structures)
    unit, size = in_float16(G)
    U = if_shampoo.precondition(unit, Ks, structures)
    return U.float() * per_block(size * math.prod([s.square() for s in scales]), U)


def _refresh_(
    group: Group,
    structures: Structures,
    state: State,
    H: BlockCurvature,
    sizes: Sequence[int],
    dtype: torch.dtype,
) -> None:
    wide = wide_dtype(dtype)
    if "started" in state:
        # Kₙ <- (tr H/D)^{-1/(2N)}·I
        start_(state, H.root_mean_diagonal(sizes), power=-1 / len(structures))
    Ks, scales = operands(structures, state, dtype)
    H = H.for_operands(dtype, math.prod(scales))
    # h <- ½(curvature in the factors' frame + damping - γI)
    means = if_shampoo.mean_squares(Ks, scales, structures, wide=wide)
    lam = max(group["damping"], LEAST_DAMPING)
    hs = if_shampoo.tangents(Ks, scales, means, H, structures, lam=lam, gamma=group["gamma"])
    for n, h in enumerate(hs):
        if f"tangent{n}" in state:
            # m <- α₂ m + (1-α₂) h
            m = state[f"tangent{n}"]
            hs[n] = m.lerp_(h.to(m.dtype), 1 - group["riemannian_momentum"]).to(wide)

    def norm(n: int, m: Tensor) -> Tensor:  # blocks that wait for their first gradient do not move
        size = norm_of(group, structures[n], m, dtype=dtype)
        return torch.where(state["started"], size, math.inf) if "started" in state else size

    with accumulators(state, len(structures), wide) as stored:
        # K <- K (I - β₂ m/max(1, ‖m‖))
        beta2 = factor_rates(group, structures, H, stored[0])
        if_shampoo.move_factors_(stored, hs, structures, beta2=beta2, norm=norm, dtype=dtype)
        if_shampoo.balance_(stored, means)


def factor_rates(
    group: Group, structures: Structures, H: BlockCurvature, like: Tensor
) -> Sequence[float | Tensor]:
    """β₂ of every axis: by rank, unless H is given, which says more than one gradient does.

    Where only some blocks have a given H, β₂ is (b,), with the dtype and device of `like` (b, ...).
    """
    beta2 = group["precond_lr"]
    if isinstance(H, MixedCurvature):
        rates = [like.new_empty(len(like)) for _ in structures]
        for rows, each in H.members:
            for rate, mine in zip(rates, factor_rates(group, structures, each, like), strict=True):
                for part in rows:
                    rate[part] = mine
        return rates
    of_gradient = isinstance(H, OuterProducts) and not H.given
    by_rank = group.get("rate_by_rank", False) and of_gradient
    return if_shampoo.rates_by_rank(beta2, structures) if by_rank else [beta2] * len(structures)


@contextmanager
def accumulators(state: State, axes: int, wide: torch.dtype) -> Iterator[list[Tensor]]:
    """The factors in a dtype that takes small changes; they are rounded back at the end."""
    stored = [state[f"factor{n}"] for n in range(axes)]
    moved = [K.to(wide) for K in stored]  # the factors themselves where they are wide
    yield moved
    for K, new in zip(stored, moved, strict=True):
        if K.dtype == torch.bfloat16:
            stochastic_round_(K, new, state["rounding"])
            state["rounding"] += 1
        elif new is not K:  # kept in another precision than that of the products
            K.copy_(new)


def norm_of(group: Group, structure: Structure, m: Tensor, *, dtype: torch.dtype) -> Tensor:
    """‖m‖ (b,). The spectral one is from above: β₂‖m‖₂/norm < 1, so that K stays invertible."""
    if group["factor_norm"] == "frobenius":
        return frobenius_norm(structure, m)
    if group["factor_norm"] == "spectral":
        return structure.spectral_bound(m, dtype=dtype)
    return m.new_ones(len(m))


def start_(state: State, root: Tensor, *, power: float) -> Tensor:
    """Factors <- root^power·I in blocks that meet their first curvature which is not zero.

    `root` (b,) is √(tr H/D); for H = B·ggᵀ that is √(B·mean(G²)). Returns which blocks start, (b,).
    Changes state.
    """
    fresh = ~state["started"] & (root > 0) & root.isfinite()
    # At most 10¹⁵ for the product of the factors, as in rules/if_shampoo.py.
    scale = torch.where(fresh, root.clamp(min=1e-15).pow(power), 1.0)
    for name, tensor in state.items():
        if name.startswith("factor"):  # still I where the block is fresh
            tensor.mul_(per_block(scale.to(tensor.dtype), tensor))
        elif name.startswith("tangent"):
            tensor.masked_fill_(per_block(fresh, tensor), 0.0)
    state["started"] |= fresh
    return fresh


def operands(
    structures: Structures, state: State, dtype: torch.dtype
) -> tuple[list[Tensor], list[Any]]:
    """The factors in the dtype of the products, and the numbers (b,) that they were divided by.

    Only fp16 needs the division (by the RMS singular value): the others have the range of fp32.
    """
    Ks = [state[f"factor{n}"] for n in range(len(structures))]
    if dtype != torch.float16:
        return [K.to(dtype) for K in Ks], [1.0] * len(Ks)
    scales = [(s.squared_norm(K) / s.d).sqrt().float() for s, K in zip(structures, Ks, strict=True)]
    scaled = [(K / per_block(s, K)).to(dtype) for K, s in zip(Ks, scales, strict=True)]
    return scaled, scales
