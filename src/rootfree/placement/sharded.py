"""The option `placement`: which ranks share the blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rootfree.placement.local import is_sharded
from rootfree.placement.processes import initialised
from rootfree.placement.ranks import PlacementError


@dataclass(frozen=True)
class Sharded:
    """Divide the blocks of a matrix method among ranks: factors, momentum and work.

    Every block of a parameter is owned by one rank, which keeps its factors and computes its
    directions. Parameters that every rank has whole, as under DDP, also have their momentum with
    the owner, which sends the updated block to the others. Sharded parameters (FSDP2, tensor
    parallelism) keep their momentum where they are, and their blocks are divided without this
    option too.

    Args:
        mesh: the ranks, a ``DeviceMesh`` that contains those of the parameters; None: the mesh of
            the sharded parameters, or all ranks.
        replicas: the ranks are taken apart into this many equal groups, each of which divides the
            blocks among its own ranks and exchanges nothing with the others. With HSDP and a mesh
            (replicate, shard), the size of the first axis keeps all traffic inside the groups that
            shard. Default: 1.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 3)
        >>> options = {"batch_size": 32, "placement": rootfree.Sharded()}
        >>> optimizer = rootfree.IFShampoo(model.parameters(), **options)  # alone: as without it
    """

    mesh: Any = None
    replicas: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        return self  # it is immutable, and connections cannot be copied

    def __post_init__(self) -> None:
        if self.mesh is not None and not hasattr(self.mesh, "get_coordinate"):
            raise TypeError(f"mesh must be a DeviceMesh or None, got {type(self.mesh).__name__}")
        number = self.replicas
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"replicas must be a positive integer or None, got {number!r}")
        if number is not None and number < 1:
            raise ValueError(f"replicas must be a positive integer or None, got {number!r}")


class OutsideError(ValueError):
    """A mesh that this rank is not in."""


def check_placement(given: Mapping[str, Any]) -> None:
    """Refuse an argument `placement` of a constructor that is of another type."""
    value = given.get("placement")
    if value is not None and not isinstance(value, Sharded):
        raise TypeError(f"placement must be None or rootfree.Sharded(...), got {value!r}")


def claimed_placement(given: Mapping[str, Any]) -> Sharded | None:
    """The argument `placement`, unchecked: a rank that gives anything intends to share."""
    value = given.get("placement")
    return value if value is None or isinstance(value, Sharded) else Sharded()


class Sharing(NamedTuple):
    """The ranks that have the parameters, and those of them that share blocks with this one."""

    everyone: list[int]
    crew: list[int]


def sharing_ranks(placement: Sharded | None, params: Iterable[Any]) -> Sharing | None:
    """The ranks that share the blocks of these parameters; None: this process shares none."""
    meshes = [p.device_mesh for p in params if is_sharded(p)]
    distributed = torch.distributed
    if meshes and not initialised():
        raise PlacementError("sharded parameters need the process group, which was destroyed")
    if not initialised() or (placement is None and not meshes):
        return None
    ranks: list[int]
    if placement is not None and placement.mesh is not None:
        ranks = placement.mesh.mesh.flatten().tolist()
    elif meshes:
        ranks = max(meshes, key=lambda mesh: mesh.size()).mesh.flatten().tolist()
    else:
        ranks = list(range(distributed.get_world_size()))
    me, replicas = distributed.get_rank(), (placement and placement.replicas) or 1
    if me not in ranks:
        raise OutsideError(
            f"placement: the mesh with the ranks {_listed(ranks)} must contain every rank that has "
            f"the parameters, but rank {me} is not in it"
        )
    if len(ranks) % replicas != 0:
        raise ValueError(f"replicas must divide the number of ranks, {len(ranks)}, got {replicas}")
    size = len(ranks) // replicas
    first = ranks.index(me) // size * size
    crew = ranks[first : first + size]
    for mesh in meshes:
        _check_covered(mesh, crew, replicas)
    return None if len(ranks) == 1 and not meshes else Sharing(ranks, crew)


def _check_covered(mesh: Any, ranks: list[int], replicas: int) -> None:
    others = sorted({*mesh.mesh.flatten().tolist()} - {*ranks})
    if others and replicas == 1:
        raise ValueError(
            f"placement: the mesh must cover the parameters, which are also on the ranks "
            f"{_listed(others)}; its ranks are {_listed(ranks)}"
        )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def is_replicated(p: Any) -> bool:
    """Whether this rank has all of `p`."""
    return not is_sharded(p) or all(each.is_replicate() for each in p.placements)
