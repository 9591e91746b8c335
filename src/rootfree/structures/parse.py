"""From text to structure: "dense", "block_diagonal:32"."""

from __future__ import annotations

from difflib import get_close_matches

from rootfree.structures.base import Dense, Structure
from rootfree.structures.block_diagonal import BlockDiagonal, SizedStructure
from rootfree.structures.diagonal import Diagonal
from rootfree.structures.hierarchical import Hierarchical
from rootfree.structures.toeplitz import LowerToeplitz, UpperToeplitz
from rootfree.structures.triangular import LowerTriangular, UpperTriangular

_KINDS: dict[str, type[Structure]] = {
    cls.kind: cls
    for cls in (
        Dense,
        Diagonal,
        BlockDiagonal,
        LowerTriangular,
        UpperTriangular,
        Hierarchical,
        LowerToeplitz,
        UpperToeplitz,
    )
}


def make_structure(text: str, d: int) -> Structure:
    """The structure that `text` names, for an axis of size d.

    >>> make_structure("hierarchical:16", 100)
    Hierarchical(d=100, k=16)
    >>> make_structure("block_diagonal:64", 10).name
    'block_diagonal:10'
    """
    kind, colon, size = text.partition(":")
    cls = _KINDS.get(kind)
    if cls is None:
        allowed = ", ".join(_template(cls) for cls in _KINDS.values())
        near = get_close_matches(kind.lower(), _KINDS, n=1)
        hint = f"; did you mean {_template(_KINDS[near[0]])}?" if near else ""
        raise ValueError(f"structure must be one of {allowed}; got {text!r}{hint}")
    if not issubclass(cls, SizedStructure):
        if colon:
            raise ValueError(f"structure {kind} takes no size, got {text!r}")
        return cls(d)
    # isdecimal alone also accepts the digits of other scripts
    if not (size.isascii() and size.isdecimal() and int(size) > 0):
        raise ValueError(f"structure {kind}:<k> needs an integer k >= 1, got {text!r}")
    return cls(d, int(size))


def _template(cls: type[Structure]) -> str:
    return f"{cls.kind}:<k>" if issubclass(cls, SizedStructure) else cls.kind
