"""Float32 numbers kept as their bfloat16 neighbours and what is left of them: the same four bytes.

Matrix units read the neighbours as they are; nothing is cast before a product. The neighbour is the
nearest one (of two the one away from zero), so that its bits are the upper half of x plus a carry;
the rest is the signed difference of the bits. Both together are x exactly. Only the kernels know
this form: `state[p]` has both halves packed in one tensor, checkpoints have factors in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def packed(x: Tensor) -> Tensor:
    """x (fp32) as one tensor of its two halves: (2, ...) of int16."""
    upper, lower = split(x)
    return torch.stack([upper.view(torch.int16), lower])


def halves_of(factor: str, both: Tensor) -> dict[str, Tensor]:
    """Views of a packed tensor as kernels take them: factor1 -> upper1, lower1."""
    upper, lower = _views(both)
    return {factor.replace("factor", "upper"): upper, factor.replace("factor", "lower"): lower}


def pack_(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Take fp32 matrices `factor0`, ... out of the states of a stack's rows: all blocks, packed.

    In `state[p]` they keep their names, because torch looks there for what a flat checkpoint has.
    """
    names = [
        key for key, t in rows[0].items() if key.startswith("factor") and t.dtype == torch.float32
    ]
    return {name: torch.cat([packed(row.pop(name)) for row in rows], dim=1) for name in names}


def joined(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state in use with its factors in one piece."""
    return one_piece({k: join(*_views(t)) if _is_packed(k, t) else t for k, t in state.items()})


def one_piece(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state whose halves `upper0`, `lower0`, ... are factors again; what is packed stays so."""
    whole = dict(state)
    for factor, (upper, lower) in _halved(state).items():
        whole[factor] = join(whole.pop(upper), whole.pop(lower))
    return whole


def _is_packed(key: str, t: Tensor) -> bool:
    kind = getattr(t, "dtype", None)  # a checkpoint may have anything there
    return kind == torch.int16 and "factor" in key and t.dim() > 1 and t.shape[0] == 2


def _views(both: Tensor) -> tuple[Tensor, Tensor]:
    return both[0].view(torch.bfloat16), both[1]


def write_(state: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Copy a state with its factors in one piece into one with the same or with packed ones."""
    for key, tensor in whole.items():
        state[key].copy_(packed(tensor.float()) if _is_packed(key, state[key]) else tensor)


def _halved(state: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Keys of the halves of each factor: block0.factor1 -> (block0.upper1, block0.lower1).

    The states of stacks have them, and so had checkpoints once.
    """
    found = {}
    for upper in state:
        lower = upper.replace("upper", "lower")
        # A half alone is no factor: a state with one fits nothing.
        if lower != upper and lower in state and state[lower].shape == state[upper].shape:
            found[upper.replace("upper", "factor")] = (upper, lower)
    return found
