"""Time of one step, divided into optimizer, backward, forward and data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rootfree_lab.report.experiments import Group
from rootfree_lab.report.figures import COLUMN, short
from rootfree_lab.report.palette import INK, PAPER, PARTS
from rootfree_lab.report.records import Run
from rootfree_lab.report.statistics import median

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The optimizer stands at the axis, where lengths compare; the rest is stacked on it.
ORDER = ("optimizer", "backward", "forward", "data")


def milliseconds(run: Run, part: str) -> float:
    """What a part of a run took per step, nan where the record does not tell."""
    value = run.seconds.get(part, math.nan)
    known = math.isfinite(value) and math.isfinite(run.steps) and run.steps > 0
    return 1000 * value / run.steps if known else math.nan


def times(groups: Sequence[Group]) -> list[tuple[str, dict[str, float]]]:
    """Median time per step of each part over a group's runs; groups without any are left out.

    A run that failed took its time all the same, so it counts.
    """
    rows = []
    for group in groups:
        parts = {part: median(milliseconds(run, part) for run in group.runs) for part in ORDER}
        if any(math.isfinite(value) for value in parts.values()):
            rows.append((group.label, parts))
    return rows


def figure(groups: Sequence[Group]) -> Figure | None:
    """One bar a group, or None where no record has times."""
    rows = times(groups)
    if not rows:
        return None
    drawing, axes = horizontal(
        [short(label) for label, _ in rows], width=COLUMN, pitch=0.24, rest=0.75
    )
    known = {part: [parts[part] for _, parts in rows] for part in ORDER}
    ends = stack(axes, {part: np.nan_to_num(own).tolist() for part, own in known.items()})
    for place, ((_, parts), end) in enumerate(zip(rows, ends, strict=True)):
        own = parts["optimizer"]
        text = f"{own:.3g} of {end:.3g}" if math.isfinite(own) else f"{end:.3g}"
        label(axes, text, end, place)
    axes.set_xlim(0, 1.3 * max(ends) if max(ends) > 0 else 1)
    axes.set_xlabel("Milliseconds per step: optimizer of total")
    drawing.legend(loc="outside upper center", ncols=4, handlelength=1, columnspacing=1.2)
    return drawing


def horizontal(
    names: Sequence[str], *, width: float, pitch: float, rest: float
) -> tuple[Figure, Any]:
    """A figure for a bar beside each name, the first on top; bars carry their numbers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, pitch * max(len(names), 1) + rest), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    return figure, axes


def stack(axes: Any, lengths: Mapping[str, Sequence[float]]) -> list[float]:
    """Draw the parts of a step on one another, the first at the axis; where the bars end."""
    ends = [0.0] * len(next(iter(lengths.values())))
    for part, own in lengths.items():
        name, colour = PARTS[part]
        axes.barh(
            range(len(own)), own, left=ends, height=0.64, color=colour, label=name,
            edgecolor=PAPER, linewidth=0.5,
        )  # fmt: skip
        ends = [end + length for end, length in zip(ends, own, strict=True)]
    return ends


def label(axes: Any, text: str, end: float, place: int) -> None:
    """Write the numbers of a bar at its end."""
    axes.annotate(
        text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=6.5,
        color=INK,
    )  # fmt: skip
