"""Which factor each axis of a parameter gets: the options `structure` and `block_size`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from rootfree.layout.tiles import Tile, axes_of, tiles_of
from rootfree.structures import BlockDiagonal, Dense, Diagonal, Structure, make_structure

# A diagonal axis beside a dense one is cut to so many block sizes. A block then costs about what
# one with two dense factors does, and ranks can share a vocabulary evenly.
_DIAGONAL_BLOCKS = 2

_ALLOWED = (
    "'auto', a structure's name, a tuple of names (one per axis), or a dict from the number of "
    "axes to either"
)


def _symmetric(text: str, d: int) -> Structure:
    structure = make_structure(text, d)
    if not isinstance(structure, (Dense, Diagonal, BlockDiagonal)):
        raise ValueError(
            f"the structures here are dense, diagonal and block_diagonal:<k>, got {text!r}"
        )
    return structure


def structure_option(
    name: str, value: Any, *, make: Callable[[str, int], Structure] = make_structure
) -> Any:
    """A name, a tuple of names, or pairs (number of axes, name or tuple): plain and hashable."""
    if isinstance(value, dict):
        value = tuple(sorted(value.items()))
    pairs = value if _is_pairs(value) else (("all", value),)
    for axes, entry in pairs:
        if axes != "all" and (isinstance(axes, bool) or not isinstance(axes, int) or axes < 1):
            raise ValueError(f"{name} must be {_ALLOWED}; got the number of axes {axes!r}")
        for text in entry if isinstance(entry, (tuple, list)) else (entry,):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be {_ALLOWED}; got {value!r}")
            if text != "auto":
                try:
                    make(text, 1)
                except ValueError as error:
                    raise ValueError(f"{name} must be {_ALLOWED}; {error}") from error
    if not value and not isinstance(value, str):
        raise ValueError(f"{name} must be {_ALLOWED}; got {value!r}")
    return tuple(value) if isinstance(value, list) else value


#: The same for structures that hold the mirror image of every entry.
symmetric_structure_option = partial(structure_option, make=_symmetric)


def _is_pairs(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) > 0
        and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in value)
    )


def structured_tiles(
    shape: tuple[int, ...], *, structure: Any, block_size: int | None
) -> list[tuple[Tile, tuple[Structure, ...]]]:
    """Tiles of a parameter of this shape, with the structure of each axis.

    Without a block size nothing is merged or cut. A diagonal factor is as cheap as the axis is
    long, but the products along the other axes are not: beside another structure its axis is cut
    too, into longer pieces. Where all factors are diagonal nothing is.
    """
    axes = axes_of(shape, merge_up_to=block_size)
    names = _names(structure, axes)
    longer = None
    if block_size is not None and any(name != "diagonal" for name in names):
        longer = _DIAGONAL_BLOCKS * block_size
    cuts = [longer if name == "diagonal" else block_size for name in names]
    return [
        (tile, tuple(make_structure(name, d) for name, d in zip(names, tile.sizes, strict=True)))
        for tile in tiles_of(axes, cuts)
    ]


def flat_tiles(
    shape: tuple[int, ...], *, block_size: int | None
) -> list[tuple[Tile, tuple[Structure, ...]]]:
    """A parameter as one vector, cut to the block size, with a dense factor."""
    tiles = tiles_of((math.prod(shape),), (block_size,))
    return [(tile, (Dense(tile.sizes[0]),)) for tile in tiles]


def _names(structure: Any, axes: tuple[int, ...]) -> tuple[str, ...]:
    if _is_pairs(structure):
        structure = dict(structure).get(len(axes), "auto")
    if isinstance(structure, tuple):
        if len(structure) != len(axes):
            raise ValueError(
                f"structure {structure!r} is for {len(structure)} axes, but the parameter has "
                f"{len(axes)} after squeezing and merging: {axes}"
            )
        names = structure
    else:
        names = (structure,) * len(axes)
    # Length alone is no sign of a vocabulary: a long axis is cut like any other.
    auto = "diagonal" if len(axes) == 1 else "dense"
    return tuple(auto if name == "auto" else name for name in names)
