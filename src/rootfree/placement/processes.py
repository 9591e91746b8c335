"""Process groups: of devices, and of hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch

# Seconds after which a rank that waits for others warns, or gives up.
PATIENCE = 20.0


def initialised() -> bool:
    """Whether there is a process group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def digest(content: Any) -> int:
    """A hash of the repr, the same in every process; its negative fits in an int64, too."""
    return int.from_bytes(hashlib.blake2b(repr(content).encode(), digest_size=7).digest(), "little")


def ranks_of_mesh(mesh: Any, dims: Iterable[int]) -> list[int]:
    """The ranks along some axes of a mesh, through this rank."""
    wanted = set(dims)
    here = mesh.get_coordinate()
    index = tuple(slice(None) if n in wanted else here[n] for n in range(mesh.ndim))
    return sorted(mesh.mesh[index].flatten().tolist())


def device_group(ranks: Sequence[int]) -> Any:
    """A process group of these ranks; all of them must ask for it."""
    distributed = torch.distributed
    if list(ranks) == list(range(distributed.get_world_size())):
        return distributed.group.WORLD
    return _new_group(distributed.group.WORLD, tuple(ranks), None)


def host_group(ranks: Sequence[int]) -> Any:
    """A process group of these ranks for tensors on the CPU: no device waits for it.

    It belongs to this library: other threads may use other groups, as `dcp.async_save` does.
    """
    if len(ranks) == 1:
        return device_group(ranks)
    return _new_group(torch.distributed.group.WORLD, tuple(ranks), "gloo")


def takes(group: Any, device: torch.device) -> bool:
    """Whether a group has a backend for tensors on this kind of device."""
    try:
        group._get_backend(torch.device(device.type))
    except RuntimeError:
        return False
    return True


def exchange_device(group: Any, device: torch.device) -> torch.device:
    """The device that an all-to-all needs tensors on, given the one they are on."""
    if not takes(group, device):  # parameters are offloaded to the CPU, the backend is for GPUs
        return torch.device("cuda", torch.cuda.current_device())
    if device.type != "cpu" and group._get_backend(device).name() == "gloo":
        return torch.device("cpu")  # gloo has no all-to-all for GPUs
    return device


def drop_groups() -> None:
    """Forget the groups made by this module."""
    _new_group.cache_clear()


@cache
def _new_group(world: Any, ranks: tuple[int, ...], backend: str | None) -> Any:
    # `world` is part of the key: a new default group makes the old groups useless.
    return torch.distributed.new_group(
        list(ranks), timeout=_timeout(world), backend=backend, use_local_synchronization=True
    )


def _timeout(world: Any) -> timedelta | None:
    """The timeout given to `init_process_group`; None: not known."""
    backends = [world._get_backend(device) for device in world._device_types]
    options: list[Any] = [getattr(backend, "options", None) for backend in backends]
    return min((each._timeout for each in options if hasattr(each, "_timeout")), default=None)
