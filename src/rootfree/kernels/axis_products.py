"""Products along the axes of a stack of blocks, in bf16: by the vendor's library where it is fast.

The kernels are in triton_products.py. A `site` tells launches apart (see launch.py).

Matrices of odd sizes are padded. Matrix units load rows that begin at multiples of 16 bytes, which
rows of 769 bf16 numbers do not. The library would choose kernels that are several times slower, and
Triton would read one number at a time. So kernels work on the next multiple of eight: zeros beside
the operands of a product become zeros beside the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rootfree.kernels.launch import launch, triton_kernels

Site = tuple[Any, ...]

# Axes up to this size, such as the last axis of convolutions (often 9), have kernels of their own:
# the library is slow on them.
NARROW = 32
_EIGHT = 8
# Blocks are processed in portions of at most this many elements, or of one block. Temporaries then
# do not grow with the model, and launches are still large enough to keep the device busy.
PORTION = 2**27


def room(d: int) -> int:
    """The padded size of an axis of size d; narrow axes are not padded."""
    return d if d <= NARROW else -(-d // _EIGHT) * _EIGHT


def padded(X: Tensor, sizes: Sequence[int]) -> Tensor:
    """X (b, ...) padded with zeros to these sizes; X itself if it has them already."""
    if tuple(X.shape[1:]) == tuple(sizes):
        return X
    missing = [size - d for size, d in zip(sizes, X.shape[1:], strict=True)]
    return pad(X, [amount for after in reversed(missing) for amount in (0, after)])


def without(X: Tensor, sizes: Sequence[int]) -> Tensor:
    """A view of X (b, ...) without the zeros that `padded` added."""
    return X[(slice(None), *[slice(d) for d in sizes])]


def portions(
    G: Tensor, state: dict[str, Tensor], *, changes: bool
) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
    """Portions of about equal numbers of blocks: each portion's rows, its padded G and state.

    Changes to padded copies are copied back: always to G, to the state only if it `changes`. If it
    does not, the lower halves of factors are not read, and so not padded.
    """
    sizes = [operand(state, n).shape[1] for n in range(G.dim() - 1)]
    stack = padded(G, [*map(room, sizes)])
    count = -(-len(stack) // -(-stack.numel() // PORTION))
    for i in range(0, len(stack), count):
        part = slice(i, i + count)
        rows = {name: slab[part] for name, slab in state.items()}
        whole = {
            name: padded(t, [*map(room, t.shape[1:])])
            if t.dim() == 3 and (changes or not name.startswith("lower"))
            else t
            for name, t in rows.items()
        }
        yield part, stack[part], whole
        for name, t in rows.items():
            if changes and whole[name] is not t:
                t.copy_(without(whole[name], t.shape[1:]))
    if stack is not G:
        G.copy_(without(stack, sizes))


def site_of(G: Tensor, state: dict[str, Tensor], sums: Tensor | None, norm: str | None) -> Site:
    """What distinguishes the launches of one portion from those of others (see `launch`)."""
    tensors = [G, *state.values(), *([] if sums is None else [sums])]
    return (
        G.device, G.shape, operand(state, 0).dtype, "started" in state, "upper0" in state,
        None if sums is None else sums.shape, norm,
        *[t.data_ptr() % 16 for t in tensors],
    )  # fmt: skip


def operand(state: dict[str, Tensor], n: int) -> Tensor:
    """The factor as an operand of products: its upper half, if it is stored in halves."""
    return state[f"upper{n}" if f"upper{n}" in state else f"factor{n}"]


def symmetric_product(site: Site, K: Tensor) -> Tensor:
    """K Kᵀ."""
    b, d = K.shape[:2]
    tile, tiles = tiling(d, d)
    P = torch.empty_like(K)
    kernel = triton_kernels().products.product_kernel
    launch(kernel, b * tiles, K, P, d, tiles, site=site, **tile)
    return P


def multiply(site: Site, G: Tensor, n: int, M: Tensor, out: Tensor | None = None) -> Tensor:
    """Mᵀ applied along axis n of G (b, d_1..d_N), contiguous."""
    b, d, last = len(G), M.shape[1], G.dim() - 2
    site = (*site, G.shape, M.stride(), out is None)
    if out is None:
        out = torch.empty_like(G)
    if n == 0:
        torch.bmm(M.mT, G.view(b, d, -1), out=out.view(b, d, -1))
    elif n == last and d <= NARROW:
        rows = G[0].numel() // d
        tiles = -(-rows // 256)
        launch(
            triton_kernels().products.narrow_multiply_kernel,
            b * tiles, G, M, out, rows, d, tiles, M.stride(1), M.stride(2),
            site=site, ROWS=256, D=32 if d > 16 else 16, num_warps=4,
        )  # fmt: skip
    elif n == last:
        torch.bmm(G.view(b, -1, d), M, out=out.view(b, -1, d))
    else:
        product = torch.bmm(M.mT, matricised(G, n))
        moved = G.movedim(n + 1, 1).shape
        out.copy_(product.view(moved).movedim(1, n + 1))
    return out


def matricised(G: Tensor, n: int) -> Tensor:
    """G₍ₙ₎ (b, d_n, r); for the first and the last axis this is a view."""
    b, last = len(G), G.dim() - 2
    if n == 0:
        return G.flatten(2)
    if n == last:
        return G.view(b, -1, G.shape[-1]).mT
    return G.movedim(n + 1, 1).reshape(b, G.shape[n + 1], -1)


def long_gram(site: Site, X: Tensor) -> Tensor:
    """X Xᵀ of matrices with few rows and many columns."""
    b, d, r = X.shape
    if d > NARROW or X.stride(1) != 1:
        return torch.bmm(X, X.mT)
    parts = min(64, -(-r // 4096))
    sums = torch.empty(b, parts, d, d, device=X.device)
    launch(
        triton_kernels().products.narrow_gram_kernel, b * parts, X, sums, r, d, parts,
        site=site, ROWS=128, D=32 if d > 16 else 16, num_warps=4,
    )  # fmt: skip
    return sums.sum(1)


def tiling(d: int, r: int, *, sums: int = 1) -> tuple[dict[str, Any], int]:
    """The tiling of a symmetric d×d result that is a sum over r, or two such `sums`.

    Returns the constants of the kernel, and the number of tiles on and below the diagonal.
    """
    tile = 128 if d >= 128 else 64 if d > 32 else 32
    depth = 64 if tile > 32 else 32
    side = -(-d // tile)
    constants = {
        "TILE": tile,
        "DEPTH": depth,
        "EIGHTS": d % 8 == 0 and r % 8 == 0,
        "EVEN": d % tile == 0 and d % depth == 0 and r % depth == 0,
        # Eight warps are 8 % faster on large matrices, but 20 % slower for two sums in a program.
        "num_warps": 8 if d >= 1024 and sums == 1 else 4,
        "num_stages": 3,
    }
    return constants, side * (side + 1) // 2
