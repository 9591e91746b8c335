"""Dense inverse-free factors on a GPU: matrix products by the vendor's library, the rest fused.

The equations are those of rules/if_shampoo.py with the gradient outer product as curvature; the
kernels are in triton_factors.py and triton_products.py. Products are in bf16, sums in fp32, and so
are the factors: in halves (halves.py), of which products take the upper one. Hyper-parameters are
read from a table on the device (tables.py), so that recorded launches follow them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rootfree.kernels.axis_products import (
    Site,
    long_gram,
    matricised,
    multiply,
    symmetric_product,
    tiling,
)
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.structures.base import SLACK

# Blocks are worked on in portions of at most this many elements (or one block): temporaries do not
# grow with the model, and launches are still large enough to keep the device busy.
PORTION = 2**27
_BLOCK = 4096
# Beyond this ratio of columns to rows a Gram matrix is left to the library, which splits the sum.
_LONG = 16


def direction_(
    state: dict[str, Tensor],
    G: Tensor,
    squares: Tensor,
    numbers: Tensor,
    *,
    norm: str | None,
    refresh: bool,
) -> None:
    """G <- U, its direction; on refresh the factors move first.  Changes G and state.

    `squares` (b, count), float64: partial sums of the squared gradients, for factors that start
    from the first gradient. `numbers`: B, β₂, λ and γ in places 5 to 8.
    """
    axes = G.dim() - 1
    if axes == 1:
        _vectors_(state, G, numbers, norm=norm, refresh=refresh)
    else:
        portions = -(-G.numel() // PORTION)
        portion = -(-len(G) // portions)  # all of about the same size
        for i in range(0, len(G), portion):
            part = slice(i, i + portion)
            rows = {name: slab[part] for name, slab in state.items()}
            Ks = [_operand(rows, n) for n in range(axes)]
            sums = squares[part] if refresh and "started" in rows else None
            site = (*_site(G[part], rows, sums, norm), refresh)
            if refresh:
                _refresh_(site, Ks, rows, G[part], sums, numbers, norm)
            _precondition_(site, G[part], Ks)
    if refresh and "rounding" in state:
        state["rounding"] += axes


def _vectors_(
    state: dict[str, Tensor], G: Tensor, numbers: Tensor, *, norm: str | None, refresh: bool
) -> None:
    k = state["factor0"]
    launch(
        triton_kernels().factors.vector_kernel, len(G),
        G, k, state.get("started", k), state.get("rounding", k), numbers, G.shape[1],
        site=(*_site(G, state, None, norm), refresh),
        REFRESH=refresh, START="started" in state, NORM=norm or "none", BLOCK=1024, num_warps=4,
    )  # fmt: skip


def _site(G: Tensor, state: dict[str, Tensor], sums: Tensor | None, norm: str | None) -> Site:
    """What tells the launches of one portion from those of others (see `launch`)."""
    tensors = [G, *state.values(), *([] if sums is None else [sums])]
    return (
        G.device, G.shape, _operand(state, 0).dtype, "started" in state, "upper0" in state,
        None if sums is None else sums.shape, norm,
        *[t.data_ptr() % 16 for t in tensors],
    )  # fmt: skip


def _operand(state: dict[str, Tensor], n: int) -> Tensor:
    """The factor as products take it: its upper half, where it is in halves."""
    return state[f"upper{n}" if f"upper{n}" in state else f"factor{n}"]


def _refresh_(
    site: Site,
    Ks: list[Tensor],
    state: dict[str, Tensor],
    G: Tensor,
    squares: Tensor | None,
    numbers: Tensor,
    norm: str | None,
) -> None:
    """Move the factors.  Changes state, of which Ks are a part."""
    kernels = triton_kernels().factors
    b, elements = len(G), G[0].numel()
    scales = torch.empty(b, device=G.device)
    if squares is not None:
        launch(
            kernels.start_kernel, b, squares, state["started"], scales, numbers,
            squares.shape[1], elements, site=site, AXES=len(Ks), num_warps=1,
        )  # fmt: skip
    traces = []
    for n, K in enumerate(Ks):
        size = K[0].numel()
        chunks = -(-size // _BLOCK)
        traces.append(torch.empty(b, chunks, device=K.device))
        launch(
            kernels.trace_kernel, b * chunks, K, state.get(f"lower{n}", K), traces[n], scales, size,
            chunks, site=(*site, n), START=squares is not None, HALVES=f"lower{n}" in state,
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    # Ĝ = G with Kⱼᵀ on every axis j
    Ghat = G
    for n, K in enumerate(Ks):
        Ghat = multiply((*site, n), Ghat, n, K)
    chunks = -(-elements // _BLOCK)
    largest = torch.empty(b, chunks, device=G.device)
    launch(
        kernels.largest_kernel, b * chunks, Ghat, largest, elements, chunks,
        site=site, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    launch(
        kernels.scale_down_kernel, b * chunks, Ghat, largest, elements, chunks,
        site=site, BLOCK=_BLOCK,
    )  # fmt: skip
    for n, K in enumerate(Ks):
        _move_((*site, n), n, K, Ghat, largest, traces, state, numbers, norm)


def _move_(
    site: Site,
    n: int,
    K: Tensor,
    Ghat: Tensor,
    largest: Tensor,
    traces: list[Tensor],
    state: dict[str, Tensor],
    numbers: Tensor,
    norm: str | None,
) -> None:
    """K <- K(I - β₂ h/max(1, ‖h‖)).  Changes K and its lower half."""
    kernels = triton_kernels()
    b, d = K.shape[:2]
    X = matricised(Ghat, n)
    r = X.shape[2]
    tile, tiles = tiling(d, r, sums=2)
    long = r > _LONG * d
    gram = long_gram(site, X) if long else K
    others = [trace for j, trace in enumerate(traces) if j != n]
    h, q = torch.empty_like(K), torch.empty_like(K)
    sums, fourths = (torch.empty(b, tiles, device=K.device) for _ in range(2))
    launch(
        kernels.products.tangent_kernel,
        b * tiles, X, K, gram, h, sums, largest, others[0], others[-1], numbers,
        d, r, X.stride(0), X.stride(1), X.stride(2), tiles, largest.shape[1],
        others[0].shape[1], others[-1].shape[1],
        site=site, GRAM=long, OTHERS=len(others), ROW_MAJOR=X.stride(2) == 1, **tile,
    )  # fmt: skip
    if norm == "spectral":
        square, (alike, _) = kernels.products.square_kernel, tiling(d, d)
        shape = (b * tiles, h, q, sums, fourths, d, tiles)
        launch(square, *shape, site=(*site, 1), STORE=True, **alike)
        shape = (b * tiles, q, q, sums, fourths, d, tiles)
        launch(square, *shape, site=(*site, 2), STORE=False, **alike)
    torch.bmm(K, h, out=q)
    chunks = -(-d * d // _BLOCK)
    launch(
        kernels.factors.move_kernel,
        b * chunks, K, state.get(f"lower{n}", K), q, sums, fourths, state.get("started", K),
        state.get("rounding", K), numbers, d * d, chunks, tiles, n, SLACK,
        site=site, NORM=norm or "none", START="started" in state, HALVES=f"lower{n}" in state,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def _precondition_(site: Site, G: Tensor, Ks: list[Tensor]) -> None:
    """G <- G with KₙKₙᵀ on every axis n, as one product with KₙKₙᵀ where that is less work."""
    U = G
    for n, K in enumerate(Ks):
        out = G if n == len(Ks) - 1 else None
        d, r = K.shape[1], G[0].numel() // K.shape[1]
        # A product K Kᵀ, which takes some 0.65 of the time of d³, against a second application.
        if 0.65 * d < r:
            U = multiply((*site, n), U, n, symmetric_product((*site, n), K), out)
        else:
            U = multiply((*site, n), multiply((*site, n), U, n, K), n, K.mT, out)
