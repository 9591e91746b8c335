"""A record as horizontal bars, in the style of the report's figures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rootfree_lab.bench.record import IterationRecord, Record, StepRecord
from rootfree_lab.bench.table import number
from rootfree_lab.report.bars import horizontal, label, stack
from rootfree_lab.report.figures import TEXT, style
from rootfree_lab.report.palette import INK, LIGHT, PAPER, PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
_COLOURS = {"rootfree": PARTS["optimizer"][1], "torch": PARTS["backward"][1], "peer": LIGHT[0]}
_NAMES = {"rootfree": "rootfree", "torch": "torch", "peer": "other packages"}
_WIDE = 30.0  # a range beyond which lengths are logarithmic


def draw(record: Record, file: Path) -> None:
    """Write the chart; the ending says in which format."""
    with style():
        figure = _steps(record) if isinstance(record, StepRecord) else _iterations(record)
        figure.savefig(file, dpi=200)


_axes = partial(horizontal, width=TEXT, pitch=0.22, rest=1.0)


def _steps(record: StepRecord) -> Figure:
    """Median, quartiles as a line, the floor as a tick."""
    rows = [(row, row.ms) for row in record.rows if row.ms is not None]
    figure, axes = _axes([row.name for row, _ in rows])
    shown: set[str] = set()
    for place, (row, ms) in enumerate(rows):
        axes.barh(
            place, ms.median, height=0.66, color=_COLOURS[row.family], edgecolor=PAPER,
            linewidth=0.5, label=None if row.family in shown else _NAMES[row.family],
        )  # fmt: skip
        shown.add(row.family)
        axes.hlines(place, ms.lower, ms.upper, color=INK, linewidth=0.9)
        if row.floor_ms:
            axes.vlines(
                row.floor_ms, place - 0.33, place + 0.33, color=INK, linewidth=1.4,
                label=None if "floor" in shown else "floor",
            )  # fmt: skip
            shown.add("floor")
        ratio = f", {number(row.ratio)}×" if row.ratio else ""
        label(axes, f"{number(ms.median)}{ratio}", max(ms.median, ms.upper), place)
    ends = [ms.median for _, ms in rows]
    if ends and max(ends) > _WIDE * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        floors = [row.floor_ms for row, _ in rows if row.floor_ms]
        axes.set_xlim(0.7 * min([*ends, *floors]), 4 * max(ends))
    elif ends:
        axes.set_xlim(0, 1.25 * max(ends))
    axes.set_xlabel(f"Milliseconds a step (× {record.reference})")
    _finish(figure, axes, f"{record.parameters}, {record.count / 1e6:.1f} M parameters", record)
    return figure


def _iterations(record: IterationRecord) -> Figure:
    """Optimizer, backward and forward, stacked; the optimizer stands at the axis."""
    rows = [(row, row.ms) for row in record.rows if row.ms is not None]
    figure, axes = _axes([row.name for row, _ in rows])
    ends = stack(
        axes,
        {
            part: [float(getattr(row, f"{part}_ms") or 0.0) for row, _ in rows]
            for part in ("optimizer", "backward", "forward")
        },
    )
    for place, (row, ms) in enumerate(rows):
        ratio = f", {row.ratio:.2f}×" if row.ratio else ""
        label(axes, f"{number(row.optimizer_ms)} of {number(ms.median)}{ratio}", ends[place], place)
    axes.set_xlim(0, 1.3 * max(ends, default=1.0))
    axes.set_xlabel(f"Milliseconds an iteration: optimizer of total (× {record.reference})")
    _finish(figure, axes, f"Training {record.model}, batch {record.batch}", record)
    return figure


def _finish(figure: Figure, axes: Any, text: str, record: Record) -> None:
    axes.set_title(f"{text}; {record.environment.device}", loc="left")
    axes.margins(y=0.02)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4, handlelength=1)
