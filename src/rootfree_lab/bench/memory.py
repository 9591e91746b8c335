"""Memory: what a contender keeps, what a step needs temporarily, and what is free."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def state_bytes(optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of all tensors that the optimizers hold, in their state or elsewhere.

    Views of the same memory count once; parameters and gradients do not count.
    """
    known = {_storage(t) for p in parameters for t in (p, p.grad) if t is not None}
    found: dict[int, int] = {}
    seen: set[int] = set()
    for optimizer in optimizers:
        for tensor in _tensors(vars(optimizer), seen):
            if _storage(tensor) not in known:
                found[_storage(tensor)] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def temporary_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Peak of the allocator during the work above what was held before; None without a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    resting = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - resting


def free_bytes(device: torch.device) -> float:
    """What could still be allocated."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(free + idle)
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return 8e9


def release(device: torch.device) -> None:
    """Free memory that is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors in containers and in plain objects, such as the matrices of another package."""
    if id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value, seen)
    elif isinstance(tree, (list, tuple, set)):
        for value in tree:
            yield from _tensors(value, seen)
    elif hasattr(tree, "__dict__") and not isinstance(tree, type) and not callable(tree):
        yield from _tensors(vars(tree), seen)
