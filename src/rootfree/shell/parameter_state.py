"""The dtypes of computations and products, and state in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rootfree.shell.work import Group
from rootfree.structures import Diagonal, Structure

# The distance between counters of neighbouring rows.
_APART = 65537


def working_dtype(p: Tensor) -> torch.dtype:
    """The dtype in which updates of `p` are computed: float64 for float64, float32 otherwise."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def product_dtype(p: Tensor, structures: Sequence[Structure], group: Group) -> torch.dtype:
    """The dtype in which gradients of `p` are multiplied with factors; fp32 for products in fp16.

    Unless asked for, products are in bf16 on CUDA and in fp32 elsewhere, in fp64 for fp64. Diagonal
    factors alone need no matrix products, and so nothing narrower than fp32.
    """
    diagonal = all(isinstance(s, Diagonal) for s in structures)
    if "matmul_dtype" not in group or p.dtype == torch.float64 or diagonal:
        return working_dtype(p)
    default = torch.bfloat16 if p.device.type == "cuda" else torch.float32
    dtype: torch.dtype = group["matmul_dtype"] or default
    return torch.float32 if dtype == torch.float16 else dtype


def in_working_dtype(ps: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
    """The gradients in the dtype of the computation, without copies if they have it."""
    dtype = working_dtype(ps[0])
    return gs if gs[0].dtype == dtype else [g.to(dtype) for g in gs]


def parameter_state(
    p: Tensor, group: Group, fill: Mapping[str, float], *, salt: int
) -> dict[str, Tensor]:
    """State tensors laid out like `p`, each filled with a number, in the group's `state_dtype`.

    In bfloat16 there is also the counter that makes stochastic rounding repeatable. It starts at a
    different value for every parameter (`salt`), so that no two have the same noise.
    """
    dtype = group["state_dtype"] or working_dtype(p)
    state = {
        name: torch.full_like(p, value, dtype=dtype, requires_grad=False)
        for name, value in fill.items()
    }
    if dtype == torch.bfloat16:
        state["rounding"] = rounding_counters((), salt=salt, device=p.device)
    return state


def renumber_(counters: Tensor, rows: list[int]) -> None:
    """Turn counters of the rows 0, 1, ... into those of other rows.  Changes them."""
    shift = [row - i for i, row in enumerate(rows)]
    counters += torch.tensor(shift, dtype=torch.int32, device=counters.device) * _APART


def rounding_counters(shape: tuple[int, ...], *, salt: int, device: torch.device | str) -> Tensor:
    """Counters of stochastic rounding, far apart for different salts and for the rows of one."""
    start = salt * 0x9E3779B1 & 0x3FFFFFFF
    counters = torch.full(shape, start, dtype=torch.int32, device=device)
    if shape:
        counters += torch.arange(shape[0], dtype=torch.int32, device=device) * _APART
    return counters
