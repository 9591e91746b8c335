"""Which parameters a step has to update, and whether their gradients can be used."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = list[Tensor]


# Patterns of missing gradients that are remembered for a group.
_MOST = 4


class KnownList(list[Tensor]):
    """Parameters, and what is known about them: it goes when the list goes."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.known: dict[str, Any] = {}


class _Known(NamedTuple):
    params: Tensors
    kinds: list[Any]
    lists: list[Tensors]
    positions: list[list[int]]


class WorkLists:
    """Parameters with something to update, by device and dtype, in handy portions.

    The lists are remembered while the parameters and the kinds of their gradients stay the same:
    they are the same objects then, and carry what others know about them.
    """

    def __init__(self, elements_at_once: int | None) -> None:
        self._elements_at_once = elements_at_once
        self._known: dict[int, list[_Known]] = {}

    def of(self, group: dict[str, Any]) -> list[tuple[Tensors, Tensors]]:
        """Lists of parameters of a group, with their gradients, which were found usable."""
        params = group["params"]
        gs = [p.grad for p in params]
        kinds = [
            None if g is None else (p.device, p.dtype, g.dtype, g.layout)
            for p, g in zip(params, gs, strict=True)
        ]
        known = self._recall(group, kinds)
        return [
            (ps, [gs[i] for i in where])
            for ps, where in zip(known.lists, known.positions, strict=True)
        ]

    def _recall(self, group: dict[str, Any], kinds: list[Any]) -> _Known:
        params = group["params"]
        if torch.compiler.is_compiling():
            return self._sorted(params, kinds)
        patterns = self._known.setdefault(id(group), [])
        for known in patterns:
            if known.kinds == kinds and all(map(is_, known.params, params)):
                return known
        known = self._sorted(params, kinds)
        lists: list[Tensors] = [KnownList(ps) for ps in known.lists]
        patterns[:] = [known._replace(lists=lists), *patterns[: _MOST - 1]]
        return patterns[0]

    def _sorted(self, params: Tensors, kinds: list[Any]) -> _Known:
        by_kind: dict[Any, list[int]] = {}
        for i, (p, kind) in enumerate(zip(params, kinds, strict=True)):
            if kind is not None and p.numel() > 0:
                check_gradient(p)
                by_kind.setdefault(kind[:2], []).append(i)
        positions = []
        for (device, _), where in by_kind.items():
            limit = self._elements_at_once if device.type == "cpu" else None
            positions += [where] if limit is None else _portions(params, where, limit)
        lists = [[params[i] for i in where] for where in positions]
        return _Known(list(params), kinds, lists, positions)


def _portions(params: Tensors, where: list[int], limit: int) -> list[list[int]]:
    """Consecutive parameters with at most `limit` elements together (or one larger one)."""
    portions: list[list[int]] = []
    room = 0
    for i in where:
        if not portions or params[i].numel() > room:
            portions.append([])
            room = limit
        portions[-1].append(i)
        room -= params[i].numel()
    return portions


def check_gradient(p: Tensor) -> None:
    """Refuse gradients that no method here can use."""
    g = p.grad
    if g is not None and (g.layout != torch.strided or g.is_complex()):
        kind = "complex" if g.is_complex() else str(g.layout).removeprefix("torch.")
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is {kind}; "
            "only dense real gradients are supported (use sparse=False in embeddings)"
        )
