"""Between an optimizer and the curvature that it was given: when it is asked, and joint pairs.

A joint pair is a weight and its bias as one matrix [W b], W viewed as (outputs, the rest). Its
preconditioner belongs to the weight; gradients are joined on the way in, directions parted on the
way out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rootfree.blocks import Tile
from rootfree.curvature.blocks import BlockCurvature, blocks_of
from rootfree.curvature.diagonal import DiagonalCurvature
from rootfree.curvature.kronecker import KroneckerCurvature
from rootfree.curvature.protocol import Curvature, ParameterCurvature
from rootfree.curvature.sum_of_outer_products import SumOfOuterProducts

Work = Sequence[tuple[dict[str, Any], Sequence[Tensor]]]


class CurvatureSource:
    """A user's curvature, asked once at the start of a step; the answers serve that step."""

    def __init__(self, curvature: Curvature) -> None:
        if not isinstance(curvature, Curvature):
            raise TypeError(
                "curvature must have the methods joint, of, check and used "
                f"(rootfree.Curvature), got {type(curvature).__name__}"
            )
        self._curvature = curvature
        self._bias_of: dict[Tensor, Tensor] = {}
        self._weight_of: dict[Tensor, Tensor] = {}
        for weight, bias in curvature.joint():
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
        self._work: Work = ()
        self._answers: dict[Tensor, ParameterCurvature | None] = {}

    # -- joint pairs -------------------------------------------------------------------------

    def check_group(self, params: Iterable[Any]) -> None:
        """Refuse a group (of tensors, or names with tensors) that has one of a joint pair alone."""
        inside = {entry[1] if isinstance(entry, tuple) else entry for entry in params}
        for weight, bias in self._bias_of.items():
            for one, other, missing in ((weight, bias, "bias"), (bias, weight, "weight")):
                if one in inside and other not in inside:
                    raise ValueError(
                        f"the {'weight' if missing == 'bias' else 'bias'} of shape "
                        f"{tuple(one.shape)} is in this parameter group without its {missing} of "
                        f"shape {tuple(other.shape)}; the curvature treats them as one matrix, so "
                        "they must be in the same group"
                    )
            kinds = (weight.dtype, weight.device), (bias.dtype, bias.device)
            if weight in inside and kinds[0] != kinds[1]:
                raise ValueError(
                    "weight and bias of a joint pair must have the same dtype and device, got "
                    f"{kinds[0]} and {kinds[1]}"
                )

    def shape_of(self, p: Tensor) -> tuple[int, ...]:
        """The shape of what is preconditioned with `p`: its own, or that of [W b]."""
        if p not in self._bias_of:
            return tuple(p.shape)
        return p.shape[0], math.prod(p.shape[1:]) + 1

    def is_joint_weight(self, p: Tensor) -> bool:
        """Whether `p` is preconditioned together with its bias."""
        return p in self._bias_of

    def is_joint_bias(self, p: Tensor) -> bool:
        """Whether `p` is a column of another parameter's matrix."""
        return p in self._weight_of

    def joined(self, tensors: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Parameter-shaped tensors by parameter -> one for each matrix, by its weight.

        One of a pair that is missing (frozen for a while) counts as zero.
        """
        result: dict[Tensor, Tensor] = {}
        for p, t in tensors.items():
            weight = self._weight_of.get(p, p)
            if weight in result:
                continue
            if weight not in self._bias_of:
                result[p] = t
                continue
            W, b = tensors.get(weight), tensors.get(self._bias_of[weight])
            matrix = t.new_zeros(self.shape_of(weight))
            if W is not None:
                matrix[:, :-1] = W.flatten(1)
            if b is not None:
                matrix[:, -1] = b
            result[weight] = matrix
        return result

    def parted(self, matrices: Mapping[Tensor, Tensor], ps: Iterable[Tensor]) -> list[Tensor]:
        """What `joined` made, back in the shapes of the parameters `ps`."""
        result = []
        for p in ps:
            if p in self._weight_of:
                result.append(matrices[self._weight_of[p]][:, -1].contiguous())
            elif p in self._bias_of:
                result.append(matrices[p][:, :-1].reshape(p.shape))
            else:
                result.append(matrices[p])
        return result

    # -- a step ------------------------------------------------------------------------------

    @_disable_dynamo
    def check(self, work: Work, refreshes: Callable[[dict[str, Any]], bool]) -> None:
        """Let the curvature refuse a step that refreshes some of `work`, groups with parameters."""
        self._work = [(group, ps) for group, ps in work if refreshes(group)]
        params = [p for _, ps in self._work for p in ps]
        if params:
            self._curvature.check(params)

    @_disable_dynamo
    def ask(self) -> None:
        """Get H of all that was checked, and look at its form before anything changes."""
        answers: dict[Tensor, ParameterCurvature | None] = {}
        for group, ps in self._work:
            for p in ps:
                p = self._weight_of.get(p, p)
                if p not in answers:
                    H = self._curvature.of(p, batch_size=group["batch_size"])
                    _check_form(H, p, self.shape_of(p))
                    answers[p] = H
        self._answers = answers

    @_disable_dynamo
    def done(self) -> None:
        """The step is over; what was recorded for it is no longer needed."""
        refreshed, self._answers, self._work = bool(self._answers), {}, ()
        if refreshed:
            self._curvature.used()

    def blocks(
        self, tiles: Iterable[tuple[Tensor, Tile]], G: Tensor, *, B: int
    ) -> BlockCurvature | None:
        """H of the stack of these parameters' tiles with gradients G; None: all of it is B·ggᵀ."""
        return blocks_of([(tile, self._answers[p]) for p, tile in tiles], G, B=B)

    @_disable_dynamo
    def diagonals(self, ps: Sequence[Tensor], gs: Sequence[Tensor], *, B: int) -> list[Tensor]:
        """diag(H) in the shapes of the parameters; B·g² where H is not known."""
        result = []
        for p, g in zip(ps, gs, strict=True):
            weight = self._weight_of.get(p, p)
            H = self._answers[weight]
            if H is None:
                result.append(B * g.square())
                continue
            h = H.diagonal().to(g.dtype).reshape(self.shape_of(weight))
            result.extend(self.parted({weight: h}, [p]))
        return result


def _check_form(H: Any, p: Tensor, shape: tuple[int, ...]) -> None:
    what = f"the curvature of a parameter of shape {tuple(p.shape)}"
    if H is None:
        return
    if isinstance(H, SumOfOuterProducts):
        tensors, fits = [H.V], tuple(H.V.shape[1:]) == shape
        wanted, got = f"V of shape (r, {', '.join(map(str, shape))})", tuple(H.V.shape)
    elif isinstance(H, DiagonalCurvature):
        tensors, fits = [H.h], tuple(H.h.shape) == shape
        wanted, got = f"h of shape {shape}", tuple(H.h.shape)
    elif isinstance(H, KroneckerCurvature):
        tensors, fits = list(H.factors), H.numel == math.prod(shape)
        wanted, got = f"axes with product {math.prod(shape)}", H.axes
    else:
        raise TypeError(
            f"{what} must be SumOfOuterProducts, KroneckerCurvature, DiagonalCurvature or None, "
            f"got {type(H).__name__}"
        )
    if not fits:
        raise ValueError(f"{what} must have {wanted}, got {got}")
    for t in tensors:
        if not torch.is_floating_point(t):
            raise TypeError(f"{what} must be of a real floating-point dtype, got {t.dtype}")
        if hasattr(t, "full_tensor") != hasattr(p, "full_tensor"):
            raise TypeError(f"{what} must be sharded (a DTensor) if and only if the parameter is")
        if t.device != p.device:
            raise ValueError(f"{what} must be on {p.device}, got {t.device}")
