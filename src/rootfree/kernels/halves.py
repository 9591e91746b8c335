"""Float32 numbers kept as their bfloat16 neighbours and what is left of them: the same four bytes.

Matrix units read the neighbours as they are; nothing is cast before a product. The neighbour is the
nearest one (of two the one away from zero), so that its bits are the upper half of x plus a carry;
the rest is the signed difference of the bits. Both together are x exactly. Only the kernels know
this form: checkpoints have factors in one piece.
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
    lower = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), lower.to(torch.int16)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 numbers that `split` made these of."""
    bits = upper.contiguous().view(torch.int16).to(torch.int32) << 16
    return (bits + lower.to(torch.int32)).view(torch.float32)


def joined(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state with its factors in one piece."""
    whole = dict(state)
    for factor, (upper, lower) in _halved(state).items():
        whole[factor] = join(whole.pop(upper), whole.pop(lower))
    return whole


def in_halves(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state with its fp32 matrices `factor0`, ... in halves `upper0`, `lower0`, ..."""
    result: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key.startswith("factor") and tensor.dtype == torch.float32:
            number = key.removeprefix("factor")
            result[f"upper{number}"], result[f"lower{number}"] = split(tensor)
        else:
            result[key] = tensor
    return result


def write_(state: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Copy a state with its factors in one piece into one with the same or with halves."""
    halved = _halved(state)
    for key, tensor in whole.items():
        if key in halved:
            for name, half in zip(halved[key], split(tensor.float()), strict=True):
                state[name].copy_(half)
        else:
            state[key].copy_(tensor)


def _halved(state: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Keys of the halves of each factor: block0.factor1 -> (block0.upper1, block0.lower1)."""
    found = {}
    for upper in state:
        lower = upper.replace("upper", "lower")
        # A half alone is no factor: a state with one fits nothing.
        if lower != upper and lower in state and state[lower].shape == state[upper].shape:
            found[upper.replace("upper", "factor")] = (upper, lower)
    return found
