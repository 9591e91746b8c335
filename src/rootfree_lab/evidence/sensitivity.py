"""Plots of a search: how the result of a trial depends on lr, precond_lr and damping."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from rootfree_lab.report.configuration import optimizer_settings
from rootfree_lab.report.curves import METRIC_NAMES, logarithmic, power_of_ten
from rootfree_lab.report.figures import TEXT, save, style
from rootfree_lab.report.palette import Style, handles, styles
from rootfree_lab.report.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETTINGS = ("lr", "precond_lr", "damping")
# Who looks the same in every plot of the page; others take what these leave.
USUAL = ("SGD", "AdamW", "RFRMSprop", "IFShampoo", "IFWhitening", "Shampoo", "Muon")

Point = tuple[str, float, float, bool]  # optimizer, setting, result, whether the trial finished


def points(runs: Sequence[Run], setting: str, measure: str) -> list[Point]:
    """The trials of the optimizers that have the setting and recorded a result."""
    factor = 100 if measure == "test_error" else 1
    found = []
    for run in runs:
        value = _positive(optimizer_settings(run).get(setting, ""))
        result = factor * run.final[measure]
        if math.isfinite(value) and math.isfinite(result):
            found.append((run.label, value, result, run.status == "completed"))
    return found


@dataclass(frozen=True)
class Plot:
    """The points of a search, a panel for each setting that some optimizer has."""

    measure: str
    panels: Mapping[str, Sequence[Point]]

    @property
    def sign(self) -> str:
        """Ends the file of a plot: tells from which points it was drawn."""
        content = json.dumps([self.measure, self.panels]).encode()
        return f"<!-- points {hashlib.sha256(content).hexdigest()[:16]} -->\n"


def plot(runs: Sequence[Run], measure: str) -> Plot | None:
    """The plot of a search, None where no trial has a point."""
    panels = {setting: points(runs, setting, measure) for setting in SETTINGS}
    panels = {setting: found for setting, found in panels.items() if found}
    return Plot(measure, panels) if panels else None


def draw(plot: Plot, file: Path) -> None:
    """Write a plot as SVG."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with style():
        save(_figure(plot.panels, plot.measure), file.with_suffix(""), formats=("svg",))
    with open(file, "a", encoding="utf-8", newline="\n") as end:
        end.write(plot.sign)


def _figure(panels: Mapping[str, Sequence[Point]], measure: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    labels = list(dict.fromkeys(label for found in panels.values() for label, *_ in found))
    drawn = looks(labels)
    figure = Figure(figsize=(TEXT, 0.36 * TEXT), layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (setting, found) in zip(places, panels.items(), strict=True):
        for label, finished in product(labels, (True, False)):
            there = [(x, y) for name, x, y, done in found if (name, done) == (label, finished)]
            # A trial that was given up is drawn where it stood, as a cross.
            look = drawn[label]
            marker = look.marker if finished else "x"
            if there:
                axes.plot(
                    *zip(*there, strict=True),
                    color=look.colour,
                    marker=marker,
                    linestyle="none",
                    markersize=4,
                )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(setting)
    results = [y for found in panels.values() for _, _, y, _ in found]
    if min(results) > 0 and max(results) / min(results) >= 10:
        logarithmic(places[0], min(results), max(results))
    places[0].set_ylabel(METRIC_NAMES[measure])
    entries = handles(drawn, linestyle="none")
    figure.legend(handles=entries, loc="outside upper center", ncols=len(labels), columnspacing=1.2)
    return figure


def looks(labels: Sequence[str]) -> dict[str, Style]:
    """How each is drawn: the usual ones always alike, others as one of these that is not there."""
    others = iter([label for label in labels if label not in USUAL])
    taken = [name if name in labels else next(others, name) for name in USUAL]
    drawn = styles([*taken, *others])
    return {label: drawn[label] for label in labels}


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if value > 0 else math.nan
