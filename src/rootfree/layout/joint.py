"""Joint pairs: a weight and its bias preconditioned as one matrix [W b].

W is viewed as (outputs, the rest), the bias is the last column. The preconditioner belongs to the
weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from rootfree.layout.tiles import Piece, Tile, pieces_of


class JointPairs:
    """Which parameters are preconditioned together, and what that makes of their shapes."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self._bias_of: dict[Tensor, Tensor] = {}
        self._weight_of: dict[Tensor, Tensor] = {}
        for weight, bias in pairs:
            if weight.dim() < 2 or bias.shape != weight.shape[:1]:
                raise ValueError(
                    f"a joint pair must be a weight (outputs, ...) and a bias (outputs,), got "
                    f"shapes {tuple(weight.shape)} and {tuple(bias.shape)}"
                )
            if weight.numel() == 0:
                continue  # no inputs: the bias is on its own
            if weight in self._bias_of or bias in self._weight_of:
                raise ValueError("a parameter is in two joint pairs; it may be in one")
            self._bias_of[weight], self._weight_of[bias] = bias, weight

    def check_group(self, params: Iterable[Any]) -> None:
        """Refuse a group (of tensors, or names with tensors) that has one of a joint pair alone."""
        inside = {entry[1] if isinstance(entry, tuple) else entry for entry in params}
        for weight, bias in self._bias_of.items():
            names = {"weight": weight, "bias": bias}
            here, missing = sorted(names, key=lambda name: names[name] not in inside)
            if names[here] in inside and names[missing] not in inside:
                raise ValueError(
                    f"the {here} of shape {tuple(names[here].shape)} is in this parameter group "
                    f"without its {missing} of shape {tuple(names[missing].shape)}; the curvature "
                    "treats them as one matrix, so they must be in the same group "
                    "(KFACRecorder(..., joint=False) takes them apart, which lets a companion have "
                    "the bias)"
                )
            kinds = (weight.dtype, weight.device), (bias.dtype, bias.device)
            if weight in inside and kinds[0] != kinds[1]:
                raise ValueError(
                    "weight and bias of a joint pair must have the same dtype and device, got "
                    f"{kinds[0]} and {kinds[1]}"
                )

    def check_apart(self, params: Iterable[Tensor]) -> None:
        """Refuse weights of joint pairs, where ranks share blocks."""
        if any(map(self.is_weight, params)):
            raise ValueError(
                "curvature must not treat a weight and its bias as one matrix where ranks share "
                "blocks (placement, or sharded parameters); KFACRecorder(..., joint=False) takes "
                "them apart"
            )

    def owner(self, p: Tensor) -> Tensor:
        """The parameter that has the preconditioner of `p`: itself, or the weight of a bias."""
        return self._weight_of.get(p, p)

    def is_weight(self, p: Tensor) -> bool:
        """Whether `p` is preconditioned together with its bias."""
        return p in self._bias_of

    def shape_of(self, p: Tensor) -> tuple[int, ...]:
        """The shape of what is preconditioned with `p`: its own, or that of [W b]."""
        if p not in self._bias_of:
            return tuple(p.shape)
        return p.shape[0], math.prod(p.shape[1:]) + 1

    def pieces_of(self, p: Tensor, tile: Tile) -> list[Piece]:
        """Where the blocks of a tile of `p`, or of the matrix [W b], are."""
        if p not in self._bias_of:
            return [pieces_of(p, tile)]
        return _joint_pieces(p, self._bias_of[p], tile)

    def part_of(self, matrix: Tensor, p: Tensor) -> Tensor:
        """What of a tensor shaped like the owner's matrix belongs to `p`, in its shape."""
        if p in self._weight_of:
            return matrix[:, -1].contiguous()
        return matrix[:, :-1].reshape(p.shape) if p in self._bias_of else matrix.reshape(p.shape)


def _joint_pieces(weight: Tensor, bias: Tensor, tile: Tile) -> list[Piece]:
    """The blocks of [W b], each as parts of rows that are in W and of the bias column."""
    inputs = math.prod(weight.shape[1:])
    pieces = []
    if len(tile.view) == 1:  # the matrix as one vector: row by row
        ((begin, count, size),) = tile.runs
        for block in range(begin, begin + count * size, size):
            for row in range(block // (inputs + 1), -(-(block + size) // (inputs + 1))):
                first = row * (inputs + 1)
                start, end = max(block, first), min(block + size, first + inputs + 1)
                columns = min(end, first + inputs) - start
                rest = end - start - columns
                pieces += [
                    Piece(weight, (), (columns,), (1,), start - row, (1,), start - begin),
                    Piece(bias, (), (rest,), (1,), row, (1,), end - 1 - begin),
                ]
    else:
        (r0, rc, rs), (c0, cc, cs) = tile.runs
        stack = (cc * rs * cs, rs * cs, cs, 1)
        last = c0 + cc * cs == inputs + 1  # whether the bias is in the last blocks of each row
        whole, along, at = cc - last, (rs * inputs, cs, inputs, 1), r0 * inputs + c0
        end = whole * rs * cs  # of the blocks that are all in W
        pieces = [
            Piece(weight, (rc, whole), (rs, cs), along, at, stack, 0),
            Piece(weight, (rc, last), (rs, cs - 1), along, at + whole * cs, stack, end),
            Piece(bias, (rc, last), (rs, 1), (rs, 0, 1, 0), r0, stack, end + cs - 1),
        ]
    return [piece for piece in pieces if math.prod((*piece.counts, *piece.sizes)) > 0]
