"""Dense inverse-free whitening on a GPU: the equations of rules/if_whitening.py.

This uses the kernels of factors.py in the same way: products in bf16, factors C in halves,
hyper-parameters on the device. P = C Cᵀ is computed where it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rootfree.kernels.axis_products import (
    Site,
    multiply,
    operand,
    portions,
    site_of,
    symmetric_product,
)
from rootfree.kernels.factors import (
    in_frame,
    move_,
    powers_of_two,
    tangent,
    trace,
    vectors_,
)
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.kernels.tables import SKIP


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

    `squares` (b, count), float64: partial sums of the squared gradients. `numbers` has 1, β₂, ρ and
    1 in places 5 to 8.
    """
    axes = G.dim() - 1
    if axes == 1:
        vectors_(state, G, numbers, norm=norm, refresh=refresh)
    else:
        sizes = [operand(state, n).shape[1] for n in range(axes)]
        for part, stack, whole in portions(G, state, changes=refresh):
            Cs = [operand(whole, n) for n in range(axes)]
            U, sums = stack, squares[part] if refresh else None
            site = ("whitening", *site_of(U, whole, sums, norm), *sizes, refresh)
            if refresh:
                _refresh_(site, sizes, Cs, whole, U, squares[part], numbers, norm)
            for n, C in enumerate(Cs):
                P = symmetric_product((*site, n), C)
                U = multiply((*site, n), U, n, P, stack if n == axes - 1 else None)
    if refresh and "rounding" in state:
        state["rounding"] += axes * (numbers[SKIP] == 0).int()


def _refresh_(
    site: Site,
    sizes: Sequence[int],
    Cs: list[Tensor],
    state: dict[str, Tensor],
    G: Tensor,
    squares: Tensor,
    numbers: Tensor,
    norm: str | None,
) -> None:
    """Move the factors.  Changes state, which contains Cs."""
    b, axes = len(G), len(Cs)
    scales, lams = (torch.empty(b, device=G.device) for _ in range(2))
    moves = torch.empty(b, dtype=torch.bool, device=G.device)
    launch(
        triton_kernels().factors.follow_kernel, b,
        squares, state["started"], state["mean_square"], scales, lams, moves, numbers,
        squares.shape[1], math.prod(sizes), site=site, AXES=axes, num_warps=1,
    )  # fmt: skip
    norms = [trace((*site, n), C, state.get(f"lower{n}"), scales) for n, C in enumerate(Cs)]
    Ps = [symmetric_product((*site, n), C) for n, C in enumerate(Cs)]
    traces = [trace((*site, n), P, None, None) for n, P in enumerate(Ps)]
    U, largest = in_frame(site, G, Ps)
    powers = powers_of_two(site, sizes, norms, lams)
    for n, (C, P) in enumerate(zip(Cs, Ps, strict=True)):
        h, sums, fourths = tangent((*site, n), n, sizes, P, U, largest, traces, lams, numbers, norm)
        move_(
            (*site, n), n, C, torch.bmm(h, C), sums, fourths, powers, moves, state, numbers,
            norm=norm, whiten=True,
        )  # fmt: skip
