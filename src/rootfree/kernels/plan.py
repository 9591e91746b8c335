"""Decides between rule and kernel, once for each bucket of blocks; no other place does.

The form of the state, the dtype of the products, the direction and the tail are chosen
independently of each other: the tail uses its kernel whether or not a kernel makes the directions.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rootfree.curvature import BlockCurvature
from rootfree.kernels.diagonal import FusedDiagonal
from rootfree.rules.momentum import Tail
from rootfree.structures import Dense, Diagonal, Structure

Group = dict[str, Any]
State = dict[str, Tensor]
Structures = tuple[Structure, ...]

#: The direction U of a stack of gradients: (group, structures, state, G, H) -> U. The state is
#: first refreshed, in place, with the curvature H; None leaves it as it is.
Direction = Callable[[Group, Structures, dict[str, Tensor], Tensor, BlockCurvature | None], Tensor]


@dataclass(frozen=True)
class Plan:
    """How the blocks of one bucket are processed."""

    dtype: torch.dtype  # of gathered gradients and of directions
    fused: bool  # whether kernels gather gradients and do the tail
    halves: bool  # whether fp32 factors are stored in halves
    direction: Direction  # the rule
    kernel: Callable[..., None] | None  # replaces the rule


def make_plan(
    p: Tensor, structures: Structures, group: Group, *, fused: bool, dtype: torch.dtype,
    direction: Direction, kernel: Callable[..., None] | None, given: bool = False,
) -> Plan:  # fmt: skip
    """The plan for blocks like those of `p`.

    `fused`: whether kernels run on its device at all; `dtype`: of the products; `kernel`: what
    replaces the rule, if the method has that; `given`: whether the curvature is given.
    """
    kinds = [type(s) for s in structures]
    kept = group.get("factor_dtype") or torch.float32
    dense = kinds in ([Dense] * 2, [Dense] * 3) and dtype == torch.bfloat16
    vector = kinds == [Diagonal] and dtype == torch.float32 and not given
    known = (
        fused
        and kernel is not None
        and (dense or vector)
        and kept in (torch.float32, torch.bfloat16)
        and group.get("riemannian_momentum", 0) == 0
    )
    if not known or kernel is None:
        return Plan(dtype, fused, False, direction, None)
    kernel = partial(kernel, norm=group["factor_norm"])
    if "rate_by_rank" in group:
        kernel = partial(kernel, by_rank=group["rate_by_rank"])
    return Plan(dtype, fused, dense and kept == torch.float32, direction, kernel)


def kernels_run(p: Tensor, fused: bool | None) -> bool:
    """Whether kernels run for `p`, given the optimizer's argument `fused`.

    Rules run under torch.compile, in float64, and for tensors without numbers, as used to estimate
    memory.
    """
    if torch.compiler.is_compiling() or isinstance(p, FakeTensor) or p.dtype == torch.float64:
        return False
    if p.device.type not in kernel_devices(fused):
        return False
    # With fused=True, an error of Triton is raised, not caught.
    return bool(fused) or _usable(p.device)


@cache
def kernel_devices(fused: bool | None) -> tuple[str, ...]:
    """The types of devices that kernels run on.

    None uses kernels on GPUs that support them. True requires them, and also accepts Triton's
    interpreter, which exists for tests.
    """
    if fused not in (None, True, False):
        raise ValueError(f"fused must be None, True or False, got {fused!r}")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if fused is False:
        return ()
    if find_spec("triton") is None:
        if fused:
            raise ValueError(
                "fused must be None or False here, got True: the fused kernels need Triton "
                "(pip install triton)"
            )
        return ()
    return ("cuda", "cpu") if fused and interpreted else ("cuda",)


@cache
def _usable(device: torch.device) -> bool:
    """Whether Triton compiles and runs a kernel on this device, tried once; warns if it does not.

    A C compiler may be missing. Matrix units before compute capability 8.0 do not support bf16.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    p, g, s = torch.ones(3, 1, device=device).unbind()
    tail = Tail(lr=0.0, alpha1=0.0, kappa=0.0, nesterov=False, decoupled=False)
    try:
        kernel = FusedDiagonal([p])
        kernel.send(tail, beta2=1.0, gamma=1.0, B=1, lam=1.0)
        kernel.update_("heavy_ball", [g], [s], [], [], [], tail)
    except Exception as error:  # of any kind: the rules run instead
        warnings.warn(
            f"the fused kernels are not used on {device}, because Triton failed "
            f"({type(error).__name__}: {error}); fused=False silences this",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
