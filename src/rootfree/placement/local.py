"""Local parts of sharded parameters.

A sharded parameter is a DTensor (FSDP2, tensor parallelism). Methods that treat elements
independently only need the local parts of the parameter, its gradient and its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from rootfree.kernels.rounding import Within


def is_sharded(t: Any) -> bool:
    """Whether it is a DTensor (without importing torch.distributed)."""
    return hasattr(t, "full_tensor")


def local(t: Any) -> Tensor:
    """The part of a tensor that is on this rank; a plain tensor itself."""
    if not is_sharded(t):
        return cast("Tensor", t)
    here = t.to_local()
    if type(here) is not Tensor and hasattr(here, "wait"):  # a reduction is still under way
        here = here.wait()
    return cast("Tensor", here.detach() if here.requires_grad else here)


def has_copies(p: Any, world: int) -> bool:
    """Whether several of these ranks, which all have parts of `p`, have the same elements."""
    if not is_sharded(p) or p.device_mesh.size() < world:
        return True
    sizes = [p.device_mesh.size(n) for n, each in enumerate(p.placements) if each.is_replicate()]
    return any(size > 1 for size in sizes)


def local_row(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a parameter, with the local parts of sharded tensors."""
    return {key: local(tensor) for key, tensor in row.items()}


def check_one_kind(p: Any, g: Any) -> None:
    """Refuse a plain gradient of a sharded parameter, and the reverse."""
    if is_sharded(p) != is_sharded(g):
        kinds = ["a plain tensor", "a DTensor"]
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is {kinds[is_sharded(g)]}, the "
            f"parameter is {kinds[is_sharded(p)]}; they must be of one kind"
        )


def local_gradient(p: Any, g: Any) -> Tensor:
    """The part of a gradient that belongs to the local part of `p`.

    A gradient may be placed differently from its parameter: with sequence parallelism, those of
    norms are sums that are not reduced yet.
    """
    check_one_kind(p, g)
    if is_sharded(p) and g.placements != p.placements:
        g = g.redistribute(p.device_mesh, p.placements)
    return local(g)


def local_parts(params: Sequence[Any], gs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The local parts of parameters and of their gradients."""
    here: tuple[list[Tensor], list[Tensor]] = ([], [])
    for p, g in zip(params, gs, strict=True):
        # FSDP2 makes gradients with the same spec object as the parameter. Not public, but several
        # calls for each tensor would cost more than a small update; pinned by a test.
        spec = getattr(p, "_spec", None)
        if spec is not None and getattr(g, "_spec", None) is spec:
            mine, given = p._local_tensor, g._local_tensor
            if type(mine) is type(given) is Tensor:
                here[0].append(mine)
                here[1].append(given)
                continue
        here[0].append(local(p))
        here[1].append(local_gradient(p, g))
    return here


def offsets_and_shape(p: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the local part of `p` begins in the whole, and its shape."""
    if not is_sharded(p):
        return (0,) * p.dim(), tuple(p.shape)
    # Not public, but only this function knows how torch orders shards of shards; pinned by a test.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    if tuple(shape) != tuple(local(p).shape):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} with placements {p.placements} has a local "
            f"part of shape {tuple(local(p).shape)} where {tuple(shape)} was expected"
        )
    return tuple(offsets), tuple(shape)


def within(p: Tensor) -> Within | None:
    """The position of the local part in the whole; None: it is the whole."""
    offsets, shape = offsets_and_shape(p)
    return None if shape == tuple(p.shape) else Within(offsets, tuple(p.shape))
