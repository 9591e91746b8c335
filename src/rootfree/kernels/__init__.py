"""Rules in fewer passes over memory, for devices that have them: chosen once, from `TABLE`.

A kernel does what a rule does and is tested against it; where there is none the rule runs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from rootfree.kernels.blocks import FusedBlocks
from rootfree.kernels.diagonal import FusedDiagonal

#: what a method asks for -> its implementation in Triton
TABLE: dict[str, Callable[[], Any]] = {
    "heavy_ball": lambda: FusedDiagonal("heavy_ball"),
    "averaged": lambda: FusedDiagonal("averaged"),
    "blocks": FusedBlocks,
}


def choose(name: str, fused: bool | None) -> Mapping[str, Any]:
    """The kernels of a method by type of device; the rules run on types that are not there.

    `fused` is the optimizer's argument: None takes kernels on GPUs where they are to be had; True
    insists, and takes them in Triton's interpreter too, which is there for tests alone.
    """
    if fused not in (None, True, False):
        raise ValueError(f"fused must be None, True or False, got {fused!r}")
    types = triton_devices() if fused is not False and name in TABLE else ()
    if fused and not types:
        raise ValueError(
            "fused must be None or False here, got True: the fused kernels need Triton "
            "(pip install triton)" + ("" if name in TABLE else ", and this method has none")
        )
    if fused is None:
        types = tuple(each for each in types if each != "cpu")
    kernel = TABLE[name]() if types else None
    return dict.fromkeys(types, kernel)


@cache
def triton_devices() -> tuple[str, ...]:
    """Types of devices that Triton kernels run on: the CPU only in Triton's interpreter."""
    if find_spec("triton") is None:
        return ()
    return ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)


@cache
def usable(device: torch.device) -> bool:
    """Whether Triton compiles and runs a kernel there, tried once; a warning says why not.

    It may lack a C compiler, and matrix units before compute capability 8.0 know no bf16.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    p, g, s = torch.ones(3, 1, device=device).unbind()
    try:
        rates = {"keep": 1.0, "gain": 1.0, "alpha1": 0.0, "lam": 1.0, "kappa": 0.0}
        FusedDiagonal("heavy_ball")([p], [g], [s], [], [], lr=0.0, **rates)
    except Exception as error:  # of whatever kind: the rules do without
        warnings.warn(
            f"the fused kernels are not used on {device}, because Triton failed "
            f"({type(error).__name__}: {error}); fused=False silences this",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
