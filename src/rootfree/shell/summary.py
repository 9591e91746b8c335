"""What every parameter got and what it costs, as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

Row = tuple[Any, Tensor, str, str, Mapping[str, Tensor]]


def named_groups(
    groups: Sequence[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Groups with the names of their parameters, or numbers where there are none."""
    index = 0
    for group in groups:
        count = len(group["params"])
        yield group, group.get("param_names") or range(index, index + count)
        index += count


def table_of(described: Iterable[Row]) -> str:
    """A line for each (name, parameter, role, preconditioner, state), and their total."""
    rows: list[tuple[str, ...]] = [("parameter", "shape", "role", "preconditioner", "state bytes")]
    total = elements = 0
    for name, p, role, preconditioner, state in described:
        size = sum(t.numel() * t.element_size() for t in state.values())
        shape = "x".join(map(str, p.shape)) or "scalar"
        rows.append((str(name), shape, role, preconditioner, f"{size:,}"))
        total, elements = total + size, elements + p.numel()
    per_parameter = total / max(elements, 1)
    rows.append(("total", f"{elements:,}", "", f"{per_parameter:.2f} bytes each", f"{total:,}"))
    if not any(row[2] for row in rows[1:]):  # groups made by hand have none
        rows = [(*row[:2], *row[3:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([*map(str.ljust, row[:-1], widths), row[-1].rjust(widths[-1])]) for row in rows
    )
