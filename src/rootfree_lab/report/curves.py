"""Learning curves: median and spread over seeds, against steps, epochs and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rootfree_lab.report.experiments import Experiment, Group
from rootfree_lab.report.figures import COLUMN, TEXT, short
from rootfree_lab.report.palette import MOST_DRAWN, PAPER, Style, handles
from rootfree_lab.report.records import AXES, METRICS, Array
from rootfree_lab.report.statistics import Band, Series, band, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_NAMES = {"step": "Steps", "epoch": "Epochs", "seconds": "Seconds"}
METRIC_NAMES = {
    "train_loss": "Training loss",
    "test_loss": "Test loss",
    "test_error": "Test error (%)",
}
LOG_FROM = 10  # largest over smallest value from which a logarithmic scale shows more
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
HEADROOM = 3  # times the largest starting value: what rises beyond leaves the panel


@dataclass(frozen=True)
class Curve:
    """What one group draws in one panel."""

    label: str
    band: Band
    stops: list[tuple[float, float]]  # where failed runs ended


def drawn(experiment: Experiment) -> list[Group]:
    """The groups that figures show: all, or the best when there are more than styles."""
    if len(experiment.groups) <= MOST_DRAWN:
        return list(experiment.groups)
    ranked = sorted(experiment.groups, key=experiment.rank)
    best = {group.label for group in ranked[:MOST_DRAWN]}
    return [group for group in experiment.groups if group.label in best]


def panels(experiment: Experiment) -> tuple[list[str], list[str]]:
    """The metrics and the axes for which some run has points."""
    curves = [run.curve for group in experiment.groups for run in group.runs]

    def known(axis: str, metric: str) -> bool:
        return any(series(curve[axis], curve[metric]).x.size for curve in curves)

    metrics = [m for m in METRICS if any(known(axis, m) for axis in AXES)]
    return metrics, [axis for axis in AXES if any(known(axis, metric) for metric in metrics)]


def curves(groups: Sequence[Group], axis: str, metric: str) -> list[Curve]:
    """The curves of a panel, one a group that has points."""
    found = []
    for group in groups:
        lines = [series(run.curve[axis], _scaled(run.curve[metric], metric)) for run in group.runs]
        stops = [
            (float(line.x[-1]), float(line.y[-1]))
            for run, line in zip(group.runs, lines, strict=True)
            if run.status != "completed" and line.x.size
        ]
        middle = _band(group, lines, axis, metric)
        if middle.x.size:
            found.append(Curve(group.label, middle, stops))
    return found


def _band(group: Group, lines: list[Series], axis: str, metric: str) -> Band:
    # Runs that never recorded this metric say nothing; those that diverged at once still count.
    places = [place for place, line in enumerate(lines) if line.x.size or line.diverged]
    used, found = [group.runs[place].curve for place in places], [lines[place] for place in places]
    if axis == "seconds":
        for base in ("step", "epoch"):
            by_base = [series(curve[base], _scaled(curve[metric], metric)) for curve in used]
            clocks = [series(curve[base], curve["seconds"]) for curve in used]
            # Only if each of the points that has a time has this too.
            if [part.x.size for part in by_base] == [line.x.size for line in found]:
                return band(by_base, clocks)
    return band(found)


def _scaled(values: Array, metric: str) -> Array:
    return values * 100 if metric == "test_error" else values


def draw(
    axes: Axes, found: Sequence[Curve], axis: str, metric: str, looks: Mapping[str, Style]
) -> None:
    """Draw one panel."""
    # Later curves would hide the first where they meet; thin bands first keep all lines visible.
    unit, name = _time_unit(found) if axis == "seconds" else (1.0, AXIS_NAMES[axis])
    for number, curve in enumerate(found):
        look, middle = looks[curve.label], curve.band
        x = middle.x / unit
        if middle.x.size > 1:
            axes.fill_between(
                x, middle.low, middle.high, color=look.colour, alpha=0.15, linewidth=0, zorder=1.5
            )
        # A few markers, at other places for each curve: told apart in grey print too.
        spaced = (0.03 + 0.2 * number / max(len(found), 1), 0.2) if x.size > 6 else None
        axes.plot(
            x,
            middle.middle,
            color=look.colour,
            linestyle=look.dash,
            marker=look.marker,
            markevery=spaced,
            markeredgecolor=PAPER,
            markeredgewidth=0.4,
            zorder=2.5,
        )
        for stop_x, stop_y in curve.stops:
            axes.plot(
                [stop_x / unit], [stop_y], color=look.colour, marker="x", markersize=5,
                markeredgewidth=1.2, linestyle="none", zorder=3,
            )  # fmt: skip
    axes.set_xlabel(name)
    axes.set_ylabel(METRIC_NAMES[metric])
    _scale(axes, found, axis)


def _scale(axes: Axes, found: Sequence[Curve], axis: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    # Round numbers, whole ones for epochs, and few of them.
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=axis == "epoch"))

    if axis == "step":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if not found:
        return
    values = np.concatenate([part for c in found for part in (c.band.low, c.band.high)])
    top = HEADROOM * max(float(c.band.middle[0]) for c in found)
    reached = float(values.max())
    highest = top if 0 < top < reached else reached
    # A loss of zero has no place on a logarithmic scale: its curve leaves the panel below.
    bottom = float(values[values > 0].min(initial=math.inf)) if values.min() >= 0 else math.inf
    if highest / bottom >= LOG_FROM:
        logarithmic(axes, bottom, highest)
    if highest < reached:
        axes.set_ylim(top=highest)


def logarithmic(axes: Axes, bottom: float, highest: float) -> None:
    """A logarithmic y axis for values from `bottom` to `highest`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    # The data with a little air; the locator would begin a decade below.
    air = (highest / bottom) ** 0.04
    axes.set_ylim(bottom / air, highest * air)
    span = math.log10(highest / bottom)
    # Three to ten labels: 1, 2, 5 within two decades, 1, 3 within three, then powers of ten.
    within = (1, 2, 5) if span < 2 else (1, 3) if span < 3 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=within, numticks=10))
    # Plain numbers where they are short, powers of ten where the axis spans many of them.
    powers = span > 4 or bottom < 1e-3
    text = power_of_ten if powers and within == (1,) else "{:g}".format
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def power_of_ten(value: float) -> str:
    """The label of a logarithmic axis."""
    # Not TeX: labels are drawn as they are, since a dollar in one is a dollar.
    return "10" + f"{round(math.log10(value))}".translate(_RAISED)


def _time_unit(found: Sequence[Curve]) -> tuple[float, str]:
    longest = max((float(curve.band.x[-1]) for curve in found), default=0.0)
    if longest > 2 * 3600:
        return 3600.0, "Hours"
    return (60.0, "Minutes") if longest > 10 * 60 else (1.0, "Seconds")


def panel(experiment: Experiment, axis: str, metric: str, looks: Mapping[str, Style]) -> Figure:
    """One panel without a legend, for a page that has its own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(COLUMN, 0.7 * COLUMN), layout="constrained")
    draw(figure.subplots(), curves(drawn(experiment), axis, metric), axis, metric, looks)
    return figure


def grid(
    experiment: Experiment, metrics: Sequence[str], axes: Sequence[str], looks: Mapping[str, Style]
) -> Figure:
    """Panels of some metrics (rows) against some axes (columns), and one legend for all."""
    from matplotlib.figure import Figure

    width = TEXT if len(axes) > 1 else COLUMN
    row = 0.68 * width / len(axes) if len(axes) > 1 else 0.62 * width
    groups = drawn(experiment)
    # As few rows of the legend as its text needs, filled evenly.
    letters = sum(len(short(group.label)) + 8 for group in groups)
    legend_rows = min(len(groups), math.ceil(letters / (14 * width)))
    columns = math.ceil(len(groups) / legend_rows)
    figure = Figure(
        figsize=(width, row * len(metrics) + 0.15 * legend_rows + 0.1), layout="constrained"
    )
    places = figure.subplots(len(metrics), len(axes), squeeze=False)
    for line, metric in enumerate(metrics):
        for column, axis in enumerate(axes):
            place = places[line, column]
            draw(place, curves(groups, axis, metric), axis, metric, looks)
            # An outer label says it once for its row or column.
            if column:
                place.set_ylabel("")
            if line + 1 < len(metrics):
                place.set_xlabel("")
    shown = {group.label: looks[group.label] for group in groups}
    edge = {"markeredgecolor": PAPER, "markeredgewidth": 0.4}
    entries = handles(shown, short, **edge)
    figure.legend(handles=entries, loc="outside upper center", ncols=columns, columnspacing=1.4)
    return figure
