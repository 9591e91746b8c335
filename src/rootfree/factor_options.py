"""Which factor each axis of a parameter gets: the options `structure` and `block_size`."""

from __future__ import annotations

from typing import Any

import torch

from rootfree.blocks import Tile, axes_of, tiles_of
from rootfree.options import (
    BASIC_OPTIONS,
    Check,
    OneOf,
    Optional,
    Real,
    positive_integer,
)
from rootfree.schedules import refresh_interval
from rootfree.structures import Structure, make_structure

# With structure="auto" an axis longer than this many blocks (a vocabulary) gets a diagonal factor.
_LONG = 16
_DEFAULT_LONG_AXIS = 16384

_ALLOWED = (
    "'auto', a structure's name, a tuple of names (one per axis), or a dict from the number of "
    "axes to either"
)


def structure_option(name: str, value: Any) -> Any:
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
                    make_structure(text, 1)
                except ValueError as error:
                    raise ValueError(f"{name} must be {_ALLOWED}; {error}") from error
    if not value and not isinstance(value, str):
        raise ValueError(f"{name} must be {_ALLOWED}; got {value!r}")
    return tuple(value) if isinstance(value, list) else value


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
    long, so its axis is never cut.
    """
    axes = axes_of(shape, merge_up_to=block_size)
    names = _names(structure, axes, block_size)
    cuts = [None if name == "diagonal" else block_size for name in names]
    return [
        (tile, tuple(make_structure(name, d) for name, d in zip(names, tile.sizes, strict=True)))
        for tile in tiles_of(axes, cuts)
    ]


def _names(structure: Any, axes: tuple[int, ...], block_size: int | None) -> tuple[str, ...]:
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
    return tuple(
        _auto(n, axes, block_size) if name == "auto" else name for n, name in enumerate(names)
    )


def _auto(n: int, axes: tuple[int, ...], block_size: int | None) -> str:
    longest = _LONG * block_size if block_size else _DEFAULT_LONG_AXIS
    return "diagonal" if len(axes) == 1 or axes[n] > longest else "dense"


def positive(name: str, value: Any) -> float:
    """A number above zero."""
    number = Real()(name, value)
    if number == 0:
        raise ValueError(f"{name} must be in (0, inf), got {value!r}")
    return number


def init_scale_option(name: str, value: Any) -> float | str:
    """A positive number or "gradient"."""
    return value if value == "gradient" else positive(name, value)


#: Options of the methods that work on blocks.
BLOCK_OPTIONS: dict[str, Check] = {
    **{name: check for name, check in BASIC_OPTIONS.items() if name != "betas"},
    "gamma": Real(high=1.0),
    "update_every": refresh_interval,
    "block_size": Optional(positive_integer),
    "update_rms": Optional(positive),
    "max_update_rms": Optional(positive),
}

#: Options of the inverse-free methods among them.
INVERSE_FREE_OPTIONS: dict[str, Check] = {
    **BLOCK_OPTIONS,
    # I - β₂m/‖m‖ must stay invertible.
    "precond_lr": Real(high=1.0, open_high=True),
    "riemannian_momentum": Real(high=1.0, open_high=True),
    "structure": structure_option,
    "factor_norm": OneOf((None, "frobenius", "spectral")),
    "init_scale": init_scale_option,
    "factor_dtype": Optional(OneOf((torch.float32, torch.float64, torch.bfloat16))),
    "matmul_dtype": Optional(OneOf((torch.float32, torch.float64, torch.bfloat16, torch.float16))),
}
