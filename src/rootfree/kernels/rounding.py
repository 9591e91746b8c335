"""Stochastic rounding: writes wide results into narrow state without losing small updates.

A bfloat16 number has eight significant bits. Rounding to nearest loses an update below 1/512 of the
value every time, so a moving average with a small step never moves. Rounding up or down at random,
with probabilities that make the mean right, keeps such updates.

The noise is a hash of (element, counter), not a draw from a random generator. A resumed run needs
only the counter in its state to continue bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

# Odd 32-bit constants of the usual integer mixers, as signed numbers.
_GOLDEN = 0x9E3779B1 - 2**32
_MIX = 0x85EBCA6B - 2**32


class Within(NamedTuple):
    """A part of a larger tensor; its elements get the noise that they have in the whole."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole

    def positions(self, part: Tensor) -> Tensor:
        """The index in the whole of each element of the part."""
        index = torch.zeros((), dtype=torch.int64, device=part.device)
        for n, (offset, d) in enumerate(zip(self.offsets, part.shape, strict=True)):
            along = torch.arange(offset, offset + d, device=part.device)
            index = index.unsqueeze(-1) + along * math.prod(self.shape[n + 1 :])
        return index


def hash_noise(like: Tensor, counter: Tensor, within: Within | None = None) -> Tensor:
    """Uniform integers in [0, 2¹⁶) shaped like `like`, a function of position and counter.

    A counter (b,) has one number for each `like[i]`, whose noise then does not depend on the other
    rows.
    """
    shape = like.shape[counter.dim() :]
    if within is None:
        x = torch.arange(math.prod(shape), device=like.device).view(shape) * _GOLDEN
    else:
        x = within.positions(like) * _GOLDEN
    x = x + (counter * _MIX).view(counter.shape + (1,) * len(shape))
    # Explicitly from 64 bits to 32: in int32, torch.compile's CPU code got vector tails wrong.
    x = (x & 0xFFFFFFFF).to(torch.int32)
    # Two rounds of multiply and shift: neighbours and successive counters become unrelated.
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MIX
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _GOLDEN
    return (x >> 16) & 0xFFFF


def advance_(counters: list[Tensor], by: int, *, skip: Tensor | None) -> None:
    """Advance counters by the number of roundings of a step.  Changes counters.

    `skip`, on the device: they stay as they are if it is not 0.
    """
    if skip is None:
        torch._foreach_add_(counters, by)
    else:  # a list, because the host would read a single tensor
        amount = by * (skip == 0).to(counters[0].dtype)
        torch._foreach_add_(counters, [amount.expand_as(counter) for counter in counters])


def stochastic_round_(
    narrow: Tensor, wide: Tensor, counter: Tensor, within: Within | None = None
) -> None:
    """narrow (bf16) <- wide (fp32), rounded up or down at random so that the mean is `wide`."""
    # 16 random bits, added to the 16 that are dropped, carry with the probability of that fraction.
    wide = wide.float().contiguous()
    bits = wide.view(torch.int32) + hash_noise(wide, counter, within)
    rounded = (bits & -0x10000).view(torch.float32)
    # The bits of a NaN plus noise may carry out of the exponent and look like zero or infinity.
    narrow.copy_(torch.where(wide.isnan(), wide, rounded))


@contextmanager
def widened(
    tensors: list[Tensor],
    dtype: torch.dtype,
    counters: list[Tensor],
    withins: Sequence[Within | None] | None = None,
) -> Iterator[list[Tensor]]:
    """Work on `tensors` in `dtype`; on leaving, bf16 tensors get the stochastically rounded result.

    Tensors that already have the dtype are passed through without a copy. Each use advances the
    counters, so that no two roundings share their noise. `withins`: what the tensors are parts of,
    on ranks that have only parts.
    """
    if not tensors or tensors[0].dtype == dtype:
        yield tensors
        return
    wide = [t.to(dtype) for t in tensors]
    yield wide
    if not counters:
        torch._foreach_copy_(tensors, wide)
    else:
        parts = withins or [None] * len(tensors)
        for narrow, result, counter, part in zip(tensors, wide, counters, parts, strict=True):
            stochastic_round_(narrow, result, counter, part)
        torch._foreach_add_(counters, 1)
