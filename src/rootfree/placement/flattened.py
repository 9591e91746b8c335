"""Parameters that `FullyShardedDataParallel` (FSDP1) has flattened to vectors.

torch marks them by attributes that are not public; tests/distributed/test_flattened.py pins these.
"""

from __future__ import annotations

from collections.abc import Iterable

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
