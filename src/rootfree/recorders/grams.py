"""Sums of outer products of rows, in the precision that the device multiplies fast.

The sums themselves are kept in float32 (float64 for float64 rows), whatever the rows' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rootfree.structures.base import wide_dtype

# Half-precision products that are summed and returned in float32: CUDA only, newer torch only.
_WIDE_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()

_NOTHING = nullcontext()


def row_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which rows of `x` are multiplied: on a GPU that of autocast, where it is on."""
    if not x.is_floating_point():
        return torch.get_default_dtype()
    if x.is_cuda and x.dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return x.dtype


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context without autocast. It surrounds every layer, so it is nothing where that is off."""
    return _autocast_off(device_type) if torch.is_autocast_enabled(device_type) else _NOTHING


@contextmanager
def _autocast_off(device_type: str) -> Iterator[None]:
    torch.set_autocast_enabled(device_type, False)  # torch.autocast takes ten times as long
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, True)


def gram_of_rows(rows: Tensor) -> Tensor:
    """Σ_r rows[r] rows[r]ᵀ for rows (r, d): (d, d)."""
    wide = wide_dtype(rows.dtype)
    if rows.dtype == wide:
        return rows.mT @ rows
    if rows.is_cuda and _WIDE_PRODUCTS:
        return torch.mm(rows.mT, rows, out_dtype=wide)
    return rows.mT.to(wide) @ rows.to(wide)


def grams_of_groups(X: Tensor) -> Tensor:
    """Σ_r X[r, g] X[r, g]ᵀ for rows X (r, g, d): (g, d, d)."""
    if X.shape[1] == 1:  # a plain product: no copy to bring the groups to the front
        return gram_of_rows(X.squeeze(1)).unsqueeze(0)
    wide = X.transpose(0, 1).to(wide_dtype(X.dtype))
    return wide.mT @ wide
