"""A checkpoint in one piece."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rootfree.placement.gathering import whole_tensor
from rootfree.placement.local import is_sharded


def full_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer as one process would have it: copies of whole tensors, on the CPU.

    Every rank gets all of it; write it on one. It loads into an optimizer on any number of ranks,
    under any kind of parallelism. For models that are too large for one host use
    ``torch.distributed.checkpoint`` with ``optimizer.state_dict()``.

    Args:
        optimizer: one of this library's (or any other whose state is tensors and DTensors). Where
            state is sharded, all ranks must call this.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rootfree.IFShampoo(model.parameters(), batch_size=32)
        >>> saved = rootfree.full_state_dict(optimizer)
        >>> optimizer.load_state_dict(saved)
    """
    saved = optimizer.state_dict()
    state = {
        number: {key: _whole(value) for key, value in row.items()}
        for number, row in saved["state"].items()
    }
    return {**saved, "state": state}


def _whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return whole_tensor(value).cpu() if is_sharded(value) else value.detach().to("cpu", copy=True)
