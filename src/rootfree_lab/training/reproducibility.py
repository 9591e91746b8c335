"""Seeds, random-number states and deterministic algorithms."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed all global generators: torch's on every device, Python's, NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """States of the global generators, in types that `torch.load` takes by default."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(gauss)),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


@contextmanager
def deterministic_algorithms(wanted: bool, device: torch.device) -> Iterator[None]:
    """Use deterministic kernels inside if `wanted`, and always on a CPU, where they cost nothing.

    On a GPU, an operation without a deterministic kernel is an error (see `allow_other_kernels`).
    If not `wanted`, a GPU runs the kernels that it finds to be fastest, and two equal runs differ
    in the last bits.
    """
    wanted = wanted or device.type == "cpu"
    if wanted and device.type == "cuda":
        # cuBLAS reads this when it starts, and torch refuses to be deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    old = torch.are_deterministic_algorithms_enabled()
    old_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module with a property, which types cannot say
    old_fill = memory.fill_uninitialized_memory
    old_benchmark = torch.backends.cudnn.benchmark
    try:
        if wanted:
            # The deterministic kernels of attention are chosen only in this mode.
            torch.use_deterministic_algorithms(True, warn_only=device.type == "cpu")
            # Filling new memory is for debugging, and costs a pass over every buffer.
            memory.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = not wanted
        yield
    finally:
        torch.use_deterministic_algorithms(old, warn_only=old_warn)
        memory.fill_uninitialized_memory = old_fill
        torch.backends.cudnn.benchmark = old_benchmark


def allow_other_kernels(reason: str) -> None:
    """Inside `deterministic_algorithms`: allow operations that are not, and warn about them."""
    warnings.warn(
        f"two equal runs may differ in the last bits on this device: {reason}", stacklevel=2
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
