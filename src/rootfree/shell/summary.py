"""The preconditioner and the state size of every parameter, as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rootfree.kernels.halves import joined
from rootfree.layout.joint import JointPairs
from rootfree.placement.canonical import whole_bytes
from rootfree.placement.local import local

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer


def named_groups(
    groups: Sequence[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Groups with the names of their parameters, or numbers where there are none that fit."""
    index = 0
    for group in groups:
        count, names = len(group["params"]), group.get("param_names") or ()
        yield group, names if len(names) == count else range(index, index + count)
        index += count


def table_of(optimizer: RootFreeOptimizer) -> str:
    """A line for each parameter, and a total; with local bytes where ranks divide the state."""
    head = ("parameter", "shape", "role", "preconditioner", "bytes here", "state bytes")
    rows: list[tuple[str, ...]] = [head]
    total = elements = total_here = 0
    for group, names in named_groups(optimizer.param_groups):
        for name, p in zip(names, group["params"], strict=True):
            home, row = optimizer._placing.homes.get(p), optimizer.state.get(p, {})
            whole = bytes_of(row.values()) if home is None else whole_bytes(p, home, joined(row))
            here = bytes_of(map(local, row.values()))
            shape = "x".join(map(str, p.shape)) or "scalar"
            what = (group.get("role", ""), optimizer._of(group)._describe(p, group))
            rows.append((str(name), shape, *what, f"{here:,}", f"{whole:,}"))
            total, elements, total_here = total + whole, elements + p.numel(), total_here + here
    each = f"{total / max(elements, 1):.2f} bytes each"
    rows.append(("total", f"{elements:,}", "", each, f"{total_here:,}", f"{total:,}"))
    if total_here == total:
        rows = [(*row[:4], row[5]) for row in rows]
    if not any(row[2] for row in rows[1:]):  # groups made by hand have none
        rows = [(*row[:2], *row[3:]) for row in rows]
    return aligned(rows, texts=len(rows[0]) - (1 if total_here == total else 2))


def aligned(rows: Sequence[Sequence[str]], *, texts: int) -> str:
    """Rows as lines; the first `texts` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n < texts else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Their size; of a sharded tensor that of the whole."""
    return sum(t.numel() * t.element_size() for t in tensors)


def blocks_of(p: Tensor, cut: Iterable[tuple[Any, ...]], pairs: JointPairs) -> str:
    """How many blocks `p` has, and of which factors; `cut`: its tiles with their structures."""
    if pairs.owner(p) is not p:
        return "with its weight"
    parts = []
    for _, tile, structures in cut:
        factors = " x ".join(f"{s.name} {s.d}" for s in structures)
        parts.append(f"{tile.blocks} of {factors}" if tile.blocks > 1 else factors)
    joint = " (with its bias)" if pairs.is_weight(p) else ""
    return "; ".join(parts) + joint or "none"
