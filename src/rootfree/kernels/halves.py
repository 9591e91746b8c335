"""Float32 numbers stored in two halves: the nearest bfloat16 number, and the rest of the bits.

They take the same four bytes. Matrix units read the upper half as it is; nothing is cast before a
product. The upper half is the nearest bf16 number, away from zero if there are two, so its bits are
the upper 16 bits of x plus a carry. The lower half is the signed difference of the bits. Both
together are exactly x. Only the kernels use this form: `state[p]` has both halves packed in one
tensor, and checkpoints have whole factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_NAN = 0x7FC00000  # rounding another NaN could carry out of the exponent


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper (bf16) and lower (int16) halves of x (fp32)."""
    bits = torch.where(x.isnan(), _NAN, x.contiguous().view(torch.int32))
    upper = (bits + 0x8000) >> 16
    lower = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), lower.to(torch.int16)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 numbers with these halves: the inverse of `split`."""
    bits = upper.contiguous().view(torch.int16).to(torch.int32) << 16
    return (bits + lower.to(torch.int32)).view(torch.float32)


def packed(x: Tensor) -> Tensor:
    """Both halves of x (fp32) in one tensor (2, ...) of int16."""
    upper, lower = split(x)
    return torch.stack([upper.view(torch.int16), lower])


def halves_of(factor: str, both: Tensor) -> dict[str, Tensor]:
    """Views of a packed tensor, named as kernels expect them: factor1 -> upper1, lower1."""
    upper, lower = _views(both)
    return {factor.replace("factor", "upper"): upper, factor.replace("factor", "lower"): lower}


def pack_(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Take the fp32 matrices `factor0`, ... out of the states of a stack's rows, and pack them.

    In `state[p]` they keep their names: torch looks there for the keys of a flat checkpoint.
    """
    names = [
        key for key, t in rows[0].items() if key.startswith("factor") and t.dtype == torch.float32
    ]
    return {name: torch.cat([packed(row.pop(name)) for row in rows], dim=1) for name in names}


def joined(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state in use, with whole factors."""
    return one_piece({k: join(*_views(t)) if _is_packed(k, t) else t for k, t in state.items()})


def one_piece(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state with halves `upper0`, `lower0`, ... joined into factors; packed factors stay so."""
    whole = dict(state)
    for factor, (upper, lower) in _halved(state).items():
        whole[factor] = join(whole.pop(upper), whole.pop(lower))
    return whole


def _is_packed(key: str, t: Tensor) -> bool:
    kind = getattr(t, "dtype", None)  # a checkpoint may have any object there
    return kind == torch.int16 and "factor" in key and t.dim() > 1 and t.shape[0] == 2


def _views(both: Tensor) -> tuple[Tensor, Tensor]:
    return both[0].view(torch.bfloat16), both[1]


def write_(state: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Copy a state with whole factors into one whose factors are whole or packed."""
    for key, tensor in whole.items():
        state[key].copy_(packed(tensor.float()) if _is_packed(key, state[key]) else tensor)


def _halved(state: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Keys of the halves of each factor: block0.factor1 -> (block0.upper1, block0.lower1).

    The states of stacks have halves, and so had checkpoints of earlier versions.
    """
    found = {}
    for upper in state:
        lower = upper.replace("upper", "lower")
        # A single half is not a factor; a state with one matches no optimizer.
        if lower != upper and lower in state and state[lower].shape == state[upper].shape:
            found[upper.replace("upper", "factor")] = (upper, lower)
    return found
