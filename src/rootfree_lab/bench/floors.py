"""The least that a step has to do: bytes to move, and operations of matrix products.

Layout: a block of sizes (d_1..d_N) has D = ∏ d_n entries. A step of inverse-free Shampoo needs the
following multiplications and additions for every axis n with a dense factor:

    Ĝ (K applied once)         2 D d_n     refresh only
    gram of Ĝ                  2 D d_n     refresh only
    KᵀK, K m                   4 d_n³      refresh only
    direction (K, then Kᵀ)     4 D d_n     every step

For a p×d matrix this is 2(4p²d + 4pd² + 2p³ + 2d³) on refresh, and half of the first two terms
otherwise. It is the rule written as plain products. Symmetric products need only half of theirs,
and a stored K Kᵀ halves the direction, so a step can be a little faster than this floor. Norms are
not counted.

Bytes: parameters and gradients are read, and parameters are written. Momenta and diagonal
preconditioners are read and written. Factors are read in every step (only the upper half of those
in halves); on refresh they are read and written completely. Nothing else moves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rootfree_lab.bench.contenders import Built

_FACTOR = re.compile(r"(block\d+)\.factor(\d+)\Z")


@dataclass(frozen=True)
class Work:
    """The work of a step with refresh, and of a plain one."""

    refresh_bytes: float
    plain_bytes: float
    refresh_flops: float = 0.0
    plain_flops: float = 0.0
    matmul_dtype: torch.dtype = torch.float32


Count = Callable[["Built"], "Work | None"]


def unknown(built: Built) -> Work | None:
    """No floor is known: the rate of the device says nothing about factorisations."""
    return None


def elementwise(built: Built) -> Work:
    """Diagonal methods: one pass over all tensors of the size of the parameters."""
    moved = _elementwise_bytes(built)
    return Work(moved, moved)


def inverse_free(built: Built) -> Work | None:
    """Inverse-free Shampoo of this library, from the factors in its state; None: it has none."""
    (optimizer,) = built.optimizers
    refresh = plain = held = lower = 0.0
    for p in built.parameters:
        blocks: dict[str, list[Tensor]] = {}
        for key, tensor in optimizer.state[p].items():
            found = _FACTOR.match(key)
            if found and tensor.dtype == torch.int16:  # both halves; products do without the lower
                tensor, rest = tensor
                lower += rest.numel() * rest.element_size()
            if found:
                blocks.setdefault(found[1], []).append(tensor)
        for factors in blocks.values():
            sizes = [int(K.shape[1]) for K in factors]
            dense = [K.dim() == 3 for K in factors]
            r, f = product_flops(sizes, dense)
            refresh, plain = refresh + len(factors[0]) * r, plain + len(factors[0]) * f
            held += sum(K.numel() * K.element_size() for K in factors)
    if not held:
        return None
    moved = _elementwise_bytes(built)
    dtype = optimizer.param_groups[0].get("matmul_dtype")
    if dtype is None:
        dtype = torch.bfloat16 if built.parameters[0].is_cuda else torch.float32
    return Work(moved + 2 * (held + lower), moved + held, refresh, plain, dtype)


def published_inverse_free(built: Built, dtype: torch.dtype) -> Work:
    """The published one: a dense factor and its momentum for every axis, diagonal for vectors."""
    refresh = plain = held = 0.0
    for p in built.parameters:
        sizes = [d for d in p.shape if d != 1] or [1]
        dense = len(sizes) > 1
        r, f = product_flops(sizes, [dense] * len(sizes))
        refresh, plain = refresh + r, plain + f
        held += dtype.itemsize * sum(d * d if dense else d for d in sizes)
    # p and g read, p written; the momentum read and written
    moved = sum(5 * p.numel() * p.element_size() for p in built.parameters)
    return Work(moved + 4 * held, moved + held, refresh, plain, dtype)


def muon(built: Built) -> Work:
    """Five Newton-Schulz steps in bf16 on each matrix; the companion's vectors are bytes alone."""
    flops = 0.0
    for group in built.optimizers[0].param_groups:
        for p in group["params"]:
            m, n = sorted(p.shape)
            # X Xᵀ and its product with X; the square of X Xᵀ
            flops += group["ns_steps"] * (4 * m * m * n + 2 * m**3)
    moved = _elementwise_bytes(built)
    return Work(moved, moved, flops, flops, torch.bfloat16)


def product_flops(sizes: Sequence[int], dense: Sequence[bool]) -> tuple[float, float]:
    """(refresh, plain) operations for one block; diagonal factors have no products."""
    entries = math.prod(sizes)
    axes = [d for d, is_dense in zip(sizes, dense, strict=True) if is_dense]
    plain = sum(4.0 * entries * d for d in axes)
    return plain + sum(4.0 * entries * d + 4.0 * d**3 for d in axes), plain


def _elementwise_bytes(built: Built) -> float:
    moved = 0.0
    for p in built.parameters:
        moved += 3 * p.numel() * p.element_size()  # p and g read, p written
        for optimizer in built.optimizers:
            for key, t in optimizer.state.get(p, {}).items():
                # Momenta and diagonal preconditioners, not step counts and factors.
                kept = isinstance(t, Tensor) and t.dim() > 0 and "." not in key
                if kept and t.numel() == p.numel():
                    moved += 2 * t.numel() * t.element_size()
    return moved
