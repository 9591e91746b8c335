"""Dense inverse-free factors on a GPU: matrix products by the vendor's library, the rest fused.

The equations are those of rules/if_shampoo.py with the gradient outer product as curvature; the
kernels are in triton_factors.py. Products are in bf16, sums and the factors themselves in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rootfree.kernels.launch import launch, triton_kernels
from rootfree.structures import Dense, Diagonal, Structure

Structures = tuple[Structure, ...]
Site = tuple[Any, ...]

# Blocks are worked on in portions of about this many elements: temporaries stay small, and what
# one kernel writes the next still finds in the cache.
PORTION = 2**26
_BLOCK = 4096
_LEAST_DAMPING = 1e-30  # as in rules/if_shampoo.py
# A little more than the rounding of the products, as in structures/norms.py.
_SLACK = 1 + 2 * torch.finfo(torch.bfloat16).eps
# Beyond this ratio of columns to rows a Gram matrix is left to the library, which splits the sum.
_LONG = 16
# The last axis of convolutions (9, say): the library is slow on such odd sizes.
_NARROW = 32


@dataclass(frozen=True)
class Rates:
    """Hyper-parameters of the factors."""

    B: int
    beta2: float
    lam: float
    gamma: float
    norm: str | None


def fits(structures: Structures, state: dict[str, Tensor], G: Tensor) -> bool:
    """Whether the kernels know these factors.

    They know two or three dense ones with products in bf16, and a diagonal one on one axis.
    """
    kinds = [type(s) for s in structures]
    dense = kinds in ([Dense] * 2, [Dense] * 3) and G.dtype == torch.bfloat16
    vector = kinds == [Diagonal] and G.dtype == torch.float32
    return (
        (dense or vector)
        and "tangent0" not in state
        and state["factor0"].dtype in (torch.float32, torch.bfloat16)
    )


def direction_(
    structures: Structures,
    state: dict[str, Tensor],
    G: Tensor,
    squares: Tensor | None,
    rates: Rates,
    *,
    refresh: bool,
) -> None:
    """G <- U, its direction; on refresh the factors move first.  Changes G and state.

    `squares` (b, count), float64: partial sums of the squared gradients, for factors that start
    from the first gradient.
    """
    if len(structures) == 1:
        _vectors_(state, G, rates, refresh=refresh)
    else:
        portion = max(1, PORTION // math.prod(G.shape[1:]))
        for i in range(0, len(G), portion):
            part = slice(i, i + portion)
            rows = {name: slab[part] for name, slab in state.items()}
            Ks = [rows[f"factor{n}"] for n in range(len(structures))]
            sums = squares[part] if refresh and squares is not None and "started" in rows else None
            site = _site(G[part], Ks, sums, rates)
            halves = _refresh(site, Ks, rows, G[part], sums, rates) if refresh else _halves(Ks)
            _precondition_(site, G[part], halves)
    if refresh and "rounding" in state:
        state["rounding"] += len(structures)


def _vectors_(state: dict[str, Tensor], G: Tensor, rates: Rates, *, refresh: bool) -> None:
    k = state["factor0"]
    site = (*_site(G, [k], state.get("started"), rates), refresh)
    _launch(
        site,
        "vector_kernel",
        len(G),
        G,
        k,
        state.get("started", k),
        state.get("rounding", k),
        G.shape[1],
        float(rates.B),
        rates.beta2,
        max(rates.lam, _LEAST_DAMPING),
        rates.gamma,
        REFRESH=refresh,
        START="started" in state,
        NORM=rates.norm or "none",
        BLOCK=1024,
        num_warps=4,
    )


def _site(G: Tensor, Ks: list[Tensor], sums: Tensor | None, rates: Rates) -> Site:
    """What tells the launches of one portion from those of others (see `launch`)."""
    tensors = [G, *Ks, *([] if sums is None else [sums])]
    return (
        G.device, G.shape, Ks[0].dtype, None if sums is None else sums.shape, rates.norm,
        *[t.data_ptr() % 16 for t in tensors],
    )  # fmt: skip


def _halves(Ks: list[Tensor]) -> list[Tensor]:
    return [K if K.dtype == torch.bfloat16 else K.to(torch.bfloat16) for K in Ks]


def _refresh(
    site: Site,
    Ks: list[Tensor],
    state: dict[str, Tensor],
    G: Tensor,
    squares: Tensor | None,
    rates: Rates,
) -> list[Tensor]:
    """Move the factors; returns them in bf16.  Changes Ks and state["started"]."""
    b, elements = len(G), G[0].numel()
    scales = torch.empty(b, device=G.device)
    if squares is not None:
        _launch(
            site, "start_kernel", b, squares, state["started"], scales,
            squares.shape[1], elements, float(rates.B), AXES=len(Ks), num_warps=1,
        )  # fmt: skip
    halves, traces = [], []
    for n, K in enumerate(Ks):
        size = K[0].numel()
        chunks = -(-size // _BLOCK)
        half = torch.empty_like(K, dtype=torch.bfloat16)
        trace = torch.empty(b, chunks, device=K.device)
        _launch(
            (*site, n), "halve_kernel", b * chunks, K, half, trace, scales, size, chunks,
            START=squares is not None, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        halves.append(half)
        traces.append(trace)
    # Ĝ = G with Kⱼᵀ on every axis j
    Ghat = G
    for n, half in enumerate(halves):
        Ghat = _multiply((*site, n), Ghat, n, half)
    chunks = -(-elements // _BLOCK)
    largest = torch.empty(b, chunks, device=G.device)
    _launch(
        site, "largest_kernel", b * chunks, Ghat, largest, elements, chunks,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    _launch(site, "scale_down_kernel", b * chunks, Ghat, largest, elements, chunks, BLOCK=_BLOCK)
    return [
        _move((*site, n), n, K, halves[n], Ghat, largest, traces, state, rates)
        for n, K in enumerate(Ks)
    ]


def _move(
    site: Site,
    n: int,
    K: Tensor,
    half: Tensor,
    Ghat: Tensor,
    largest: Tensor,
    traces: list[Tensor],
    state: dict[str, Tensor],
    rates: Rates,
) -> Tensor:
    """K <- K(I - β₂ h/max(1, ‖h‖)); returns the new K in bf16.  Changes K."""
    b, d = K.shape[:2]
    X = _matricised(Ghat, n)
    r = X.shape[2]
    tile = _tiling(d, r)
    side = -(-d // tile["TILE"])
    tiles = side * (side + 1) // 2
    started = state.get("started", K)
    start = {"START": "started" in state}
    long = r > _LONG * d
    gram = _long_gram(site, X) if long else half
    others = [trace for j, trace in enumerate(traces) if j != n]
    # λ ∏_{j≠n} 1/dⱼ: the kernel multiplies by the traces of the other factors
    lam = max(rates.lam, _LEAST_DAMPING) / math.prod(Ghat.shape[1:]) * d
    h, q = torch.empty_like(half), torch.empty_like(half)
    sums, fourths = torch.empty(2, b, tiles, device=K.device)
    _launch(
        site, "tangent_kernel", b * tiles, X, half, gram, h, sums, largest, others[0], others[-1],
        d, r, X.stride(0), X.stride(1), X.stride(2), tiles, largest.shape[1],
        others[0].shape[1], others[-1].shape[1], rates.B / r, lam, rates.gamma,
        GRAM=long, OTHERS=len(others), **tile,
    )  # fmt: skip
    if rates.norm == "spectral":
        _launch(
            (*site, 1),
            "square_kernel",
            b * tiles,
            h,
            q,
            sums,
            fourths,
            d,
            tiles,
            STORE=True,
            **tile,
        )
        _launch(
            (*site, 2),
            "square_kernel",
            b * tiles,
            q,
            q,
            sums,
            fourths,
            d,
            tiles,
            STORE=False,
            **tile,
        )
    torch.bmm(half, h, out=q)
    chunks = -(-d * d // _BLOCK)
    _launch(
        site, "move_kernel", b * chunks, K, q, sums, fourths, started, state.get("rounding", K),
        d * d, chunks, tiles, n, rates.beta2, _SLACK,
        NORM=rates.norm or "none", **start, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return q


def _precondition_(site: Site, G: Tensor, halves: list[Tensor]) -> None:
    """G <- G with KₙKₙᵀ on every axis n, as one product with KₙKₙᵀ where that is less work."""
    U = G
    for n, half in enumerate(halves):
        out = G if n == len(halves) - 1 else None
        d, r = half.shape[1], G[0].numel() // half.shape[1]
        # Symmetric product d³ and one application 2d²r, against two applications.
        if d < 2 * r:
            U = _multiply((*site, n), U, n, _symmetric_product((*site, n), half), out)
        else:
            U = _multiply((*site, n), _multiply((*site, n), U, n, half), n, half.mT, out)


def _symmetric_product(site: Site, half: Tensor) -> Tensor:
    """K Kᵀ."""
    b, d = half.shape[:2]
    tile = _tiling(d, d)
    side = -(-d // tile["TILE"])
    tiles = side * (side + 1) // 2
    P = torch.empty_like(half)
    _launch(site, "product_kernel", b * tiles, half, P, d, tiles, **tile)
    return P


def _multiply(site: Site, G: Tensor, n: int, M: Tensor, out: Tensor | None = None) -> Tensor:
    """Mᵀ applied along axis n of G (b, d_1..d_N), contiguous."""
    b, d, last = len(G), M.shape[1], G.dim() - 2
    if out is None:
        out = torch.empty_like(G)
    if n == 0:
        torch.bmm(M.mT, G.view(b, d, -1), out=out.view(b, d, -1))
    elif n == last and d <= _NARROW:
        rows = G[0].numel() // d
        tiles = -(-rows // 256)
        _launch(
            (*site, M.stride()), "narrow_multiply_kernel", b * tiles, G, M, out, rows, d, tiles,
            M.stride(1), M.stride(2), ROWS=256, D=32 if d > 16 else 16, num_warps=4,
        )  # fmt: skip
    elif n == last:
        torch.bmm(G.view(b, -1, d), M, out=out.view(b, -1, d))
    else:
        product = torch.bmm(M.mT, _matricised(G, n))
        moved = G.movedim(n + 1, 1).shape
        out.copy_(product.view(moved).movedim(1, n + 1))
    return out


def _matricised(G: Tensor, n: int) -> Tensor:
    """G₍ₙ₎ (b, d_n, r): a view for the first and the last axis."""
    b, last = len(G), G.dim() - 2
    if n == 0:
        return G.flatten(2)
    if n == last:
        return G.view(b, -1, G.shape[-1]).mT
    return G.movedim(n + 1, 1).reshape(b, G.shape[n + 1], -1)


def _long_gram(site: Site, X: Tensor) -> Tensor:
    """X Xᵀ of matrices with few rows and many columns."""
    b, d, r = X.shape
    if d > _NARROW or X.stride(1) != 1:
        return torch.bmm(X, X.mT)
    parts = min(64, -(-r // 4096))
    sums = torch.empty(b, parts, d, d, device=X.device)
    _launch(
        site, "narrow_gram_kernel", b * parts, X, sums, r, d, parts,
        ROWS=128, D=32 if d > 16 else 16, num_warps=4,
    )  # fmt: skip
    return sums.sum(1)


def _tiling(d: int, r: int) -> dict[str, Any]:
    """Tiles of the result and depth of the sum, for the matrix units."""
    tile = 128 if d >= 128 else 64 if d > 32 else 32
    depth = 64 if tile > 32 else 32
    return {
        "TILE": tile,
        "DEPTH": depth,
        "EVEN": d % tile == 0 and d % depth == 0 and r % depth == 0,
        "num_warps": 8 if tile == 128 else 4,
        "num_stages": 3,
    }


def _launch(site: Site, name: str, programs: int, *arguments: Any, **constants: Any) -> None:
    kernel = getattr(triton_kernels().factors, name)
    launch(kernel, programs, *arguments, site=site, **constants)
