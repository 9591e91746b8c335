"""Dense inverse-free factors on a GPU: matrix products by the vendor's library, the rest fused.

The equations are those of rules/if_shampoo.py; given.py handles a given curvature. The kernels are
in triton_factors.py, triton_vectors.py and triton_products.py. Products are in bf16, sums in fp32.
Factors are in fp32 too, stored as two halves (halves.py); products read the upper half. Kernels
read hyper-parameters from a table on the device (tables.py), so that recorded launches see their
current values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rootfree.curvature import BlockCurvature
from rootfree.kernels import given
from rootfree.kernels.axis_products import (
    Site,
    long_gram,
    matricised,
    multiply,
    operand,
    portions,
    site_of,
    symmetric_product,
    tiling,
)
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.kernels.tables import SKIP
from rootfree.structures.base import SLACK

_BLOCK = 4096
# Beyond this ratio of columns to rows, the library computes the Gram matrix: it splits the sum.
_LONG = 16


def direction_(
    state: dict[str, Tensor],
    G: Tensor,
    squares: Tensor,
    numbers: Tensor,
    *,
    norm: str | None,
    refresh: bool,
    by_rank: bool = False,
    H: BlockCurvature | None = None,
) -> None:
    """G <- U, its direction; on refresh the factors move first.  Changes G and state.

    G may be padded (axis_products.py). `squares` (b, count), float64: partial sums of the squared
    gradients, for factors that start from the first gradient. `numbers` has B, β₂, λ and γ in
    places 5 to 8. `by_rank`: β₂ is smaller for long axes (rules/if_shampoo.py). `H`: a curvature
    other than B·ggᵀ; only matrices have one.
    """
    axes = G.dim() - 1
    if axes == 1:
        vectors_(state, G, numbers, norm=norm, refresh=refresh)
    else:
        sizes = [operand(state, n).shape[1] for n in range(axes)]
        for part, stack, whole in portions(G, state, changes=refresh):
            Ks = [operand(whole, n) for n in range(axes)]
            mine = H if H is None or len(stack) == len(G) else H.rows(part)
            sums = None
            if refresh and "started" in whole:
                sums = squares[part] if mine is None else mine.root_mean_diagonal(sizes)
            site = (*site_of(stack, whole, sums, norm), *sizes, refresh, H is None)
            if refresh:
                _refresh_(site, sizes, Ks, whole, stack, sums, mine, numbers, norm, by_rank)
            _precondition_(site, stack, Ks)
    if refresh and "rounding" in state:
        state["rounding"] += axes * (numbers[SKIP] == 0).int()


def vectors_(
    state: dict[str, Tensor], G: Tensor, numbers: Tensor, *, norm: str | None, refresh: bool
) -> None:
    """G <- U for vectors, whose factors are diagonal; also for whitening.  Changes G and state."""
    k, whiten = state["factor0"], "mean_square" in state
    launch(
        triton_kernels().vectors.vector_kernel, len(G), G, k, state.get("started", k),
        state.get("mean_square", k), state.get("rounding", k), numbers, G.shape[1],
        site=(*site_of(G, state, None, norm), refresh, whiten),
        REFRESH=refresh, START="started" in state, WHITEN=whiten, NORM=norm or "none",
        BLOCK=1024, num_warps=4,
    )  # fmt: skip


def _refresh_(
    site: Site,
    sizes: Sequence[int],
    Ks: list[Tensor],
    state: dict[str, Tensor],
    G: Tensor,
    start: Tensor | None,
    H: BlockCurvature | None,
    numbers: Tensor,
    norm: str | None,
    by_rank: bool,
) -> None:
    """Move the factors.  Changes state, which contains Ks.

    `start` determines the first scale of a block: partial sums of squares, or (b,) √(tr H/D).
    """
    kernels = triton_kernels().factors
    b, elements = len(G), math.prod(sizes)
    scales = torch.empty(b, device=G.device)
    if start is not None:
        launch(
            kernels.start_kernel, b, start, state["started"], scales, numbers,
            start.numel() // b, elements, site=site, AXES=len(Ks), GIVEN=H is not None, num_warps=1,
        )  # fmt: skip
    traces = [
        trace((*site, n), K, state.get(f"lower{n}"), None if start is None else scales)
        for n, K in enumerate(Ks)
    ]
    seen = [in_frame(site, G, Ks)] * len(Ks) if H is None else given.in_frame(H, Ks, sizes)
    powers = powers_of_two(site, sizes, traces)
    for n, (K, (of_axis, largest)) in enumerate(zip(Ks, seen, strict=True)):
        rates = numbers
        by_less = elements / sizes[n] ** 2 if by_rank and sizes[n] ** 2 > elements else 1.0
        if by_less < 1 and H is None:  # β₂·D₋ₙ/dₙ
            rates = numbers.clone()
            rates[6] *= by_less
        h, sums, fourths = tangent(
            (*site, n), n, sizes, K, of_axis, largest, traces, None, numbers, norm,
            has_gram=H is not None,
        )  # fmt: skip
        product = torch.bmm(K, h)
        if by_less < 1 and H is not None:
            given.slow_(product, H, by_less)
        move_(
            (*site, n), n, K, product, sums, fourths, powers, state.get("started"), state, rates,
            norm=norm, whiten=False,
        )  # fmt: skip


def trace(site: Site, K: Tensor, lower: Tensor | None, scales: Tensor | None) -> Tensor:
    """Partial sums of K²; K is first multiplied by `scales`, if given.  Changes K and lower."""
    b, size = len(K), K[0].numel()
    chunks = -(-size // _BLOCK)
    sums = torch.empty(b, chunks, device=K.device)
    launch(
        triton_kernels().factors.trace_kernel,
        b * chunks, K, K if lower is None else lower, sums, sums if scales is None else scales,
        size, chunks, site=(*site, scales is None), START=scales is not None,
        HALVES=lower is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return sums


def in_frame(site: Site, G: Tensor, Ks: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ĝ, which is G with Kⱼᵀ on every axis j, scaled down if large; and partial maxima of |Ĝ|."""
    kernels = triton_kernels().factors
    Ghat, elements = G, G[0].numel()
    for n, K in enumerate(Ks):
        Ghat = multiply((*site, n), Ghat, n, K)
    chunks = -(-elements // _BLOCK)
    largest = torch.empty(len(G), chunks, device=G.device)
    launch(
        kernels.largest_kernel, len(G) * chunks, Ghat, largest, elements, chunks,
        site=site, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    launch(
        kernels.scale_down_kernel, len(G) * chunks, Ghat, largest, elements, chunks,
        site=site, BLOCK=_BLOCK,
    )  # fmt: skip
    return Ghat, largest


def powers_of_two(
    site: Site, sizes: Sequence[int], traces: list[Tensor], lams: Tensor | None = None
) -> Tensor:
    """Multipliers (b, N) that keep the factors of a block at one scale (rules/if_shampoo.py).

    `lams` (b,), if given, are limited by the same kernel (rules/if_whitening.py).  Changes lams.
    """
    powers = torch.empty(len(traces[0]), len(sizes), device=traces[0].device)
    launch(
        triton_kernels().factors.balance_kernel, len(powers),
        traces[0], traces[1], traces[-1], powers, powers if lams is None else lams,
        *[traces[n].shape[1] for n in (0, 1, -1)], *[sizes[n] for n in (0, 1, -1)],
        site=site, AXES=len(sizes), LIMIT=lams is not None, num_warps=1,
    )  # fmt: skip
    return powers


def tangent(
    site: Site,
    n: int,
    sizes: Sequence[int],
    K: Tensor,
    of_axis: Tensor,
    largest: Tensor,
    traces: list[Tensor],
    lams: Tensor | None,
    numbers: Tensor,
    norm: str | None,
    *,
    has_gram: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """hₙ, partial sums of h² and, for the spectral norm, of the squares of (h/‖h‖)⁴.

    `of_axis` is Ĝ and `largest` its partial maxima; with `has_gram`, they are the curvature of axis
    n and the weight of each block. `lams` (b,): λ of each block; None: λ is one of the numbers.
    `sizes`: sizes of the axes without padding.
    """
    kernels = triton_kernels().products
    b, d = K.shape[:2]
    X = K if has_gram else matricised(of_axis, n)
    r = X.shape[2]
    tile, tiles = tiling(d, r, sums=2)
    long = not has_gram and r > _LONG * d
    gram = of_axis if has_gram else long_gram(site, X) if long else K
    others = [trace for j, trace in enumerate(traces) if j != n]
    h = torch.empty_like(K)
    sums, fourths = (torch.empty(b, tiles, device=K.device) for _ in range(2))
    launch(
        kernels.tangent_kernel,
        b * tiles, X, K, gram, h, sums, largest, others[0], others[-1],
        numbers if lams is None else lams, numbers,
        d, r, X.stride(0), X.stride(1), X.stride(2), tiles, largest.numel() // b,
        others[0].shape[1], others[-1].shape[1], sizes[n], math.prod(sizes) // sizes[n],
        site=(*site, gram.dtype), GRAM=long, GIVEN=has_gram, OTHERS=len(others),
        ROW_MAJOR=X.stride(2) == 1, OF_BLOCK=lams is not None, **tile,
    )  # fmt: skip
    if norm == "spectral":
        q, (alike, _) = torch.empty_like(K), tiling(d, d)
        shape = (b * tiles, h, q, sums, fourths, d, tiles)
        launch(kernels.square_kernel, *shape, site=(*site, 1), STORE=True, **alike)
        shape = (b * tiles, q, q, sums, fourths, d, tiles)
        launch(kernels.square_kernel, *shape, site=(*site, 2), STORE=False, **alike)
    return h, sums, fourths


def move_(
    site: Site,
    n: int,
    K: Tensor,
    product: Tensor,
    sums: Tensor,
    fourths: Tensor,
    powers: Tensor,
    moves: Tensor | None,
    state: dict[str, Tensor],
    numbers: Tensor,
    *,
    norm: str | None,
    whiten: bool,
) -> None:
    """K <- 2^e·(K - β₂/max(1, ‖h‖)·product).  Changes K and its lower half.

    `product` is K h, or h K to `whiten`. `moves` (b,): which blocks move; None: all.
    """
    b, d = K.shape[:2]
    chunks = -(-d * d // _BLOCK)
    launch(
        triton_kernels().factors.move_kernel,
        b * chunks, K, state.get(f"lower{n}", K), product, sums, fourths, powers,
        K if moves is None else moves, state.get("rounding", K), numbers,
        d * d, powers.shape[1], chunks, sums.shape[1], n, SLACK,
        site=site, NORM=norm or "none", START=moves is not None, HALVES=f"lower{n}" in state,
        WHITEN=whiten, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def _precondition_(site: Site, G: Tensor, Ks: list[Tensor]) -> None:
    """G <- G with KₙKₙᵀ on every axis n: one product with KₙKₙᵀ if that is less work than two."""
    U = G
    for n, K in enumerate(Ks):
        out = G if n == len(Ks) - 1 else None
        d, r = K.shape[1], G[0].numel() // K.shape[1]
        # Making K Kᵀ takes about 0.65 of the time of d³; it saves a second product, of d²r.
        if 0.65 * d < r:
            U = multiply((*site, n), U, n, symmetric_product((*site, n), K), out)
        else:
            U = multiply((*site, n), multiply((*site, n), U, n, K), n, K.mT, out)
