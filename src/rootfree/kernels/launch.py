"""Launches Triton kernels with little work on the host.

Triton inspects every argument at every launch. Here the compiled kernel is remembered by all that
this inspection depends on, and launched directly, as in Triton's own tutorial on persistent
kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


@cache
def triton_kernels() -> Any:
    """The module that imports Triton."""
    from rootfree.kernels import triton_kernels

    return triton_kernels


def launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    site: tuple[Any, ...] | None = None,
    **constants: Any,
) -> None:
    """Run `programs` programs of a kernel; `constants` are its tl.constexpr arguments.

    A `site` must distinguish launches that differ in anything but floats and the contents of
    tensors: in integers, dtypes, constants, or the alignment of tensors to 16 bytes. Without one,
    the arguments are inspected at every launch.
    """
    key = (kernel, site or _look(arguments, constants))
    if key in _compiled:
        compiled, values = _compiled[key]
        compiled[(programs, 1, 1)](*arguments, *values)
        return
    with torch.cuda.device_of(arguments[0]):
        compiled = kernel[(programs,)](*arguments, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        order = [name for name in kernel.arg_names if name in constants]
        _compiled[key] = (compiled, tuple(constants[name] for name in order))


def _look(arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton's compiler sees of the arguments."""
    return (
        arguments[0].device,
        *[
            (a.dtype, a.data_ptr() % 16 == 0)
            if isinstance(a, Tensor)
            else (float if isinstance(a, float) else a)
            for a in arguments
        ],
        *constants.values(),
    )
