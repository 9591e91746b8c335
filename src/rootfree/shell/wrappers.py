"""Wrapped optimizers: a batch size that was set on the wrapper alone is not lost in silence."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from torch._compile import _disable_dynamo

# Callers of a step that are looked at: wrappers inside wrappers, with their decorators.
_FRAMES = 24

Wrappers = tuple["weakref.ref[Any]", ...]


@_disable_dynamo
def wrappers_around(optimizer: Any) -> Wrappers:
    """Objects that look like an optimizer, hold this one, and are calling its step right now."""
    held, found = [optimizer], []
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        # Functions that return soon: to look at the locals of a training loop keeps them alive.
        steps = frame is not None and frame.f_code.co_name.endswith("step")
        first = frame.f_code.co_varnames[:1] if frame is not None and steps else ()
        caller = frame.f_locals.get(*first) if frame is not None and first else None
        if caller is not None and all(caller is not each for each in held):
            attributes = getattr(caller, "__dict__", {}).values()
            holds = any(value is each for value in attributes for each in held)
            if holds and hasattr(caller, "param_groups") and hasattr(caller, "step"):
                held.append(caller)
                found.append(weakref.ref(caller))
        frame = None if frame is None else frame.f_back
    return tuple(found)


@_disable_dynamo
def still_untold(wrappers: Wrappers, ours: Iterable[Any]) -> Wrappers:
    """Warn if a wrapper has a batch size of its own that is not ours; returns those that have none.

    `ours`: the values in the groups. Nobody is warned twice.
    """
    values: Sequence[Any] = list(ours)
    for wrapper in filter(None, (each() for each in wrappers)):
        told = vars(wrapper).get("batch_size")
        if told is not None and any(value != told for value in values):
            name = type(wrapper).__name__
            warnings.warn(
                f"batch_size = {told!r} was set on {name}, which keeps it to itself: steps use "
                f"{values[0]!r}. Set it on the optimizer inside, or count it with "
                "rootfree.track_batch_size(model, optimizer), which looks through wrappers",
                stacklevel=2,
            )
            return ()
    return tuple(each for each in wrappers if each() is not None)
