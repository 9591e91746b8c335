"""Float32 numbers kept as their bfloat16 neighbours and what is left of them: the same four bytes.

Matrix units read the neighbours as they are; nothing is cast before a product. The neighbour is the
nearest one (the larger of two), so that its bits are the upper half of x plus a carry, and the rest
is the signed difference of the bits. Both together are x exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_NAN = 0x7FC00000  # other NaNs, rounded, carry out of the exponent


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (fp32) as its neighbours (bf16) and the rest (int16)."""
    bits = torch.where(x.isnan(), _NAN, x.contiguous().view(torch.int32))
    upper = (bits + 0x8000) >> 16
    rest = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def join(half: Tensor, rest: Tensor) -> Tensor:
    """The fp32 numbers that `split` made these of."""
    upper = half.contiguous().view(torch.int16).to(torch.int32)
    return ((upper << 16) + rest.to(torch.int32)).view(torch.float32)


def joined(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state with its factors in one piece: those whose rests are in it."""
    whole = dict(state)
    for key, factor in _rests(state).items():
        whole[factor] = join(state[factor], whole.pop(key))
    return whole


def kept_like(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A state with its factors in halves or in one piece, as `other` has them."""
    if _rests(state) == _rests(other):
        return state
    result = joined(state)
    for key, factor in _rests(other).items():
        if factor in result and result[factor].dtype == torch.float32:
            result[factor], result[key] = split(result[factor])
    return result


def _rests(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Keys of rests, with those of their factors: block0.rest1 -> block0.factor1."""
    parts = {key: key.rpartition("rest") for key in state if "rest" in key}
    return {key: f"{prefix}factor{axis}" for key, (prefix, _, axis) in parts.items()}
