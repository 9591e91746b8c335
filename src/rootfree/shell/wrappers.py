"""Wrapped optimizers: a batch size that was set on the wrapper alone causes a warning."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, MemberDescriptorType
from typing import Any

from torch._compile import _disable_dynamo

# How many callers of a step are inspected: wrappers inside wrappers, with their decorators.
_FRAMES = 24

Wrappers = tuple[Callable[[], Any], ...]


def _values(wrapper: Any) -> list[Any]:
    """The attributes of an object, in its `__dict__` and in slots."""
    members = [each for kind in type(wrapper).__mro__ for each in vars(kind).items()]
    slots = [name for name, member in members if isinstance(member, MemberDescriptorType)]
    own = [getattr(wrapper, name, None) for name in slots]
    return own + list(getattr(wrapper, "__dict__", {}).values())


def _told(wrapper: Any) -> Any:
    """The batch size that was set on an object; called at every step, so it stays cheap."""
    is_slot = isinstance(getattr(type(wrapper), "batch_size", None), MemberDescriptorType)
    own = getattr(wrapper, "__dict__", {})
    return getattr(wrapper, "batch_size", None) if is_slot else own.get("batch_size")


def _reference(wrapper: Any) -> Callable[[], Any]:
    """A weak reference to a wrapper; a strong one if its slots do not allow weak ones."""
    try:
        return weakref.ref(wrapper)
    except TypeError:
        return lambda: wrapper


@_disable_dynamo
def wrappers_around(optimizer: Any) -> Wrappers:
    """Objects that look like an optimizer, hold this one, and are calling its step right now."""
    held, found = [optimizer], []
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            break
        # Only functions that return soon: reading the locals of a training loop keeps them alive.
        first = frame.f_code.co_varnames[:1] if frame.f_code.co_name.endswith("step") else ()
        caller = frame.f_locals.get(*first) if first else None
        if caller is not None and all(caller is not each for each in held):
            holds = any(value is each for value in _values(caller) for each in held)
            if holds and hasattr(caller, "param_groups") and hasattr(caller, "step"):
                held.append(caller)
                found.append(_reference(caller))
        frame = frame.f_back
    return tuple(found)


@_disable_dynamo
def still_untold(wrappers: Wrappers, ours: Iterable[Any]) -> Wrappers:
    """Warn once if a wrapper has a batch size that differs from ours; returns wrappers to watch.

    `ours`: the values in the groups.
    """
    values: Sequence[Any] = list(ours)
    for wrapper in filter(None, (each() for each in wrappers)):
        told = _told(wrapper)
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
