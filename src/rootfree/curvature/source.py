"""Asks a user's curvature on behalf of an optimizer, and checks what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rootfree.curvature.diagonal import DiagonalCurvature
from rootfree.curvature.kronecker import KroneckerCurvature, KroneckerStack
from rootfree.curvature.outer_products import SumOfOuterProducts
from rootfree.curvature.protocol import Curvature, ParameterCurvature
from rootfree.curvature.stacking import BlockCurvature, blocks_of, cut_out
from rootfree.layout.joint import JointPairs
from rootfree.layout.tiles import Tile

#: parameters, and for each of them a number
Largest: TypeAlias = tuple[Sequence[Tensor], Tensor]


class CurvatureSource:
    """A user's curvature; it is asked once at the start of a step, for that step."""

    def __init__(self, curvature: Curvature) -> None:
        if not isinstance(curvature, Curvature):
            raise TypeError(
                "curvature must have the methods joint, of, check and used "
                f"(rootfree.Curvature), got {type(curvature).__name__}"
            )
        self._curvature = curvature
        self.pairs = JointPairs(curvature.joint())
        self._answers: dict[Tensor, ParameterCurvature | None] = {}
        self._cuts: dict[tuple[Tensor, Tile], tuple[Tile, SumOfOuterProducts]] = {}
        #: parameters, and the largest number in a tensor of the H of each: NaN if one is NaN
        self.largest: list[Largest] = []

    @property
    def name(self) -> str:
        """What kind of curvature it is."""
        return type(self._curvature).__name__

    @_disable_dynamo
    def check(self, params: Sequence[Tensor]) -> None:
        """Let the curvature refuse a step that refreshes the preconditioners of `params`."""
        if params:
            self._curvature.check(params)

    @_disable_dynamo
    def matrices_of(self, params: Iterable[Tensor]) -> list[tuple[Tensor, tuple[int, ...]]]:
        """The owners of these parameters, with the shapes of the matrices that H is of."""
        owners = dict.fromkeys(map(self.pairs.owner, params))
        return [(p, self.pairs.shape_of(p)) for p in owners]

    @_disable_dynamo
    def ask(
        self,
        matrices: Iterable[tuple[Tensor, tuple[int, ...], int]],
        blocks_here: Callable[[Tensor], Sequence[Tile] | None],
    ) -> None:
        """Ask for H of each matrix (owner, shape, B), and check it before anything changes.

        `blocks_here`: the blocks of a parameter that this rank owns; None: ranks do not share them.
        """
        self._answers, self._cuts, self.largest = {}, {}, []
        answers: dict[Tensor, ParameterCurvature | None] = {}
        held: list[tuple[Tensor, ParameterCurvature]] = []
        known: set[Any] = set()
        for p, shape, B in matrices:
            if p not in answers:
                H = self._curvature.of(p, batch_size=B)
                # All ranks may have to gather V, so now: later only owners of blocks ask for it.
                V = H.V if isinstance(H, SumOfOuterProducts) else None
                _check_form(H, p, shape, known)
                answers[p] = H
                if V is None or type(H) is SumOfOuterProducts:
                    held += [] if H is None else [(p, H)]
                else:  # at once: V is not kept, but computed again where it is used
                    self.largest += _largest([(p, SumOfOuterProducts(V))])
                if V is not None:
                    self._cuts |= {(p, tile): cut_out(tile, V) for tile in blocks_here(p) or ()}
        self.largest += _largest(held)
        self._answers = answers

    @_disable_dynamo
    def done(self) -> None:
        """The step is over; what was recorded for it is no longer needed."""
        refreshed, self._answers, self._cuts = bool(self._answers), {}, {}
        if refreshed:
            self._curvature.used()

    def blocks(self, tiles: Iterable[tuple[Tensor, Tile]], G: Tensor, *, B: int) -> BlockCurvature:
        """H of the stack of these parameters' tiles with gradients G."""
        given: list[tuple[Tile, ParameterCurvature | None]]
        if self._cuts:
            given = [self._cuts.get((p, tile)) or (tile, self._answers[p]) for p, tile in tiles]
        else:
            given = [(tile, self._answers[p]) for p, tile in tiles]
        return blocks_of(given, G, B=B)

    @_disable_dynamo
    def diagonals(
        self,
        params: Sequence[Tensor],
        gs: Sequence[Tensor],
        offsets: Sequence[Sequence[int] | None],
        *,
        B: int,
    ) -> list[Tensor]:
        """diag(H) in the shapes of the gradients; B·g² where H is not known.

        `offsets`: where each gradient begins in that of the whole parameter; None: it is all of it.
        """
        result = []
        for p, g, at in zip(params, gs, offsets, strict=True):
            owner = self.pairs.owner(p)
            H = self._answers[owner]
            if H is None:
                result.append(B * g.square())
            else:
                h = H.diagonal().to(g.dtype).reshape(self.pairs.shape_of(owner))
                h = self.pairs.part_of(h, p)
                for axis, start in enumerate(at or ()):
                    h = h.narrow(axis, min(start, h.shape[axis]), g.shape[axis])
                result.append(h)
        return result


def _check_form(H: Any, p: Tensor, shape: tuple[int, ...], known: set[Any]) -> None:
    """Refuse what is no curvature of `p`.  Changes known, the kinds of tensors already checked."""
    if H is None:
        return
    if isinstance(H, KroneckerCurvature):
        if H._stack is not None:  # one look for all rows
            look = (H._stack, shape, p.device)
            if look in known:
                return
            known.add(look)
        fits = math.prod(H.axes) == math.prod(shape)
    elif isinstance(H, SumOfOuterProducts | DiagonalCurvature):
        found = H.V.shape[1:] if isinstance(H, SumOfOuterProducts) else H.h.shape
        fits = found == shape
    else:
        raise TypeError(
            f"{_what(p)} must be SumOfOuterProducts, KroneckerCurvature, DiagonalCurvature or "
            f"None, got {type(H).__name__}"
        )
    if not fits:
        raise ValueError(f"{_what(p)} must have {_misfit(H, shape)}")
    for t in _tensors_of(H):
        kind = type(t), t.dtype, t.device, p.device
        if kind in known:
            continue
        known.add(kind)
        if not torch.is_floating_point(t):
            raise TypeError(f"{_what(p)} must be of a real floating-point dtype, got {t.dtype}")
        if hasattr(t, "full_tensor"):
            raise TypeError(f"{_what(p)} must be whole and the same on every rank, got a DTensor")
        if t.device != p.device:
            raise ValueError(f"{_what(p)} must be on {p.device}, got {t.device}")


def _what(p: Tensor) -> str:
    return f"the curvature of a parameter of shape {tuple(p.shape)}"


def _misfit(H: ParameterCurvature, shape: tuple[int, ...]) -> str:
    if isinstance(H, SumOfOuterProducts):
        return f"V of shape (r, {', '.join(map(str, shape))}), got {tuple(H.V.shape)}"
    if isinstance(H, DiagonalCurvature):
        return f"h of shape {shape}, got {tuple(H.h.shape)}"
    return f"axes with product {math.prod(shape)}, got {H.axes}"


def _largest(held: Sequence[tuple[Tensor, ParameterCurvature]]) -> list[Largest]:
    """The largest magnitude in each tensor of the H of parameters, of whole stacks in one call."""
    found: list[Largest] = []
    apart: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    stacks: dict[KroneckerStack, dict[int, Tensor]] = {}
    for p, H in held:
        if isinstance(H, KroneckerCurvature) and H._stack is not None:
            stacks.setdefault(H._stack, {})[H._row] = p
            continue
        for t in _tensors_of(H):
            if t.numel() > 0:
                apart.setdefault((t.device, t.dtype), []).append((p, t))
    for stack, owners in stacks.items():
        rows = sorted(owners)
        for largest in [factor.largest for factor in stack.factors if factor.U.numel() > 0]:
            if len(rows) < len(stack):  # what nobody asked for does not matter
                largest = torch.stack([largest[i] for i in rows])
            found.append(([owners[i] for i in rows], largest))
    for alike in apart.values():
        each = torch._foreach_norm([t for _, t in alike], math.inf)
        found += [([p], norm) for (p, _), norm in zip(alike, each, strict=True)]
    return found


def _tensors_of(H: ParameterCurvature | None) -> Sequence[Tensor]:
    if isinstance(H, KroneckerCurvature):
        return H.factors
    if isinstance(H, SumOfOuterProducts):
        return [H.V]
    return [] if H is None else [H.h]
