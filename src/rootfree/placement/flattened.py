"""Parameters that `FullyShardedDataParallel` (FSDP1) has flattened to vectors.

torch marks them by attributes that are not public; tests/distributed/test_flattened.py pins these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def flattened(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that have lost their shapes.

    With `use_orig_params=True` the original parameters are marked, too. They are pieces of one
    vector, unless nothing is sharded: then they keep their shapes, matrices included.
    """
    marked = [p for p in params if getattr(p, "_fsdp_flattened", False)]
    if any(p.dim() > 1 for p in marked):
        return [p for p in marked if getattr(p, "_is_flat_param", False)]
    return marked


def check_shapes_are_kept(
    groups: Iterable[dict[str, Any]], *, method: str, matrices: bool, nonfinite: str
) -> None:
    """Refuse flattened parameters where a step would differ from that of one process.

    `matrices`: whether the method needs their shapes.
    """
    params = [p for group in groups for p in group["params"]]
    lost = flattened(params)
    done = f"FullyShardedDataParallel (FSDP1) flattened {len(lost)} of {len(params)} parameters"
    if lost and matrices:
        raise ValueError(
            f"params must have the shapes of their layers for {method}, but {done} to vectors: no "
            "matrix is left to precondition. Use torch.distributed.fsdp.fully_shard (FSDP2), or a "
            "diagonal method"
        )
    if lost and nonfinite != "propagate":
        raise ValueError(
            f"nonfinite must be 'propagate', got {nonfinite!r}: {done}, and a rank sees only its "
            "own part of their gradient, so that some ranks would step and others not. Use "
            "torch.distributed.fsdp.fully_shard (FSDP2) to have such steps left out"
        )
