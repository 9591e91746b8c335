"""Keeps a given curvature at fixed addresses, where recorded work finds it at every replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rootfree.kernels.graphs import Recordings


def replay(
    recordings: Recordings, kind: tuple[Any, ...], work: Callable[[Any], None], given: Any
) -> None:
    """Do `work` with what is `given`, or replay it after copying that to where it was recorded."""
    tensors: list[Tensor] = []
    kind = (*kind, form_of(given, tensors))
    held = recordings.held(kind)
    if held is None:
        copies: list[Tensor] = []
        clone = partial(torch.clone, memory_format=torch.contiguous_format)
        held = (mapped(given, clone), copies)
        form_of(held[0], copies)
    elif tensors:
        torch._foreach_copy_(held[1], tensors)
    recordings(kind, partial(work, held[0]), held=held)


def form_of(tree: Any, tensors: list[Tensor]) -> Hashable:
    """An object of dataclasses, sequences and tensors, without the contents of the tensors.

    Appends the object's tensors to `tensors`.
    """
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return tree.shape, tree.dtype
    if isinstance(tree, tuple | list):
        return tuple([form_of(value, tensors) for value in tree])
    if isinstance(tree, dict):
        return tuple([(key, form_of(value, tensors)) for key, value in tree.items()])
    if isinstance(tree, slice):
        return tree.start, tree.stop
    if is_dataclass(tree):
        values = [form_of(getattr(tree, each.name), tensors) for each in fields(tree)]
        return (type(tree), *values)
    found: Hashable = tree
    return found


def mapped(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same object, with a function applied to every tensor in it."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(mapped(value, function) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        changes = {e.name: mapped(getattr(tree, e.name), function) for e in fields(tree)}
        return replace(tree, **changes)
    return tree
