"""Which parameters a step has to update, and whether their gradients can be used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def work_lists(group: dict[str, Any], elements_at_once: int | None) -> list[list[Tensor]]:
    """The group's parameters with something to update, by device and dtype, in handy portions."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in group["params"]:
        if p.grad is not None and p.numel() > 0:
            by_kind.setdefault((p.device, p.dtype), []).append(p)
    lists = []
    for (device, _), ps in by_kind.items():
        limit = elements_at_once if device.type == "cpu" else None
        lists += [ps] if limit is None else _portions(ps, limit)
    return lists


def _portions(ps: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Consecutive parameters with at most `limit` elements together (or one larger one)."""
    portions: list[list[Tensor]] = []
    room = 0
    for p in ps:
        if not portions or p.numel() > room:
            portions.append([])
            room = limit
        portions[-1].append(p)
        room -= p.numel()
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
