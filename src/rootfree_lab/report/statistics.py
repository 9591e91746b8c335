"""Statistics over seeds: of final values, and of curves that need not share their points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rootfree_lab.report.records import Array

QUARTILES_FROM = 5  # seeds; below, quartiles would be interpolations between single runs
MAX_POINTS = 400  # of a drawn curve: more than a panel has pixels to show


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation of the finite values (nan for fewer than two)."""

    mean: float
    deviation: float
    count: int


def summary(values: Iterable[float]) -> Summary:
    """Summarise the finite ones among the values."""
    finite = np.array([value for value in values if math.isfinite(value)])
    return Summary(
        mean=float(finite.mean()) if finite.size else math.nan,
        deviation=float(finite.std(ddof=1)) if finite.size > 1 else math.nan,
        count=finite.size,
    )


def median(values: Iterable[float]) -> float:
    """Median of the finite values, nan if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.median(finite)) if finite else math.nan


@dataclass(frozen=True)
class Series:
    """A metric of one run against one axis; `diverged`: its last value was not finite."""

    x: Array
    y: Array
    diverged: bool


def series(x: Array, y: Array) -> Series:
    """The points that have both coordinates, by rising x, up to the first that is not finite."""
    known = np.isfinite(x) & ~np.isnan(y)
    x, y = x[known], y[known]
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    bad = np.flatnonzero(np.isinf(y))
    end = int(bad[0]) if bad.size else len(y)
    return Series(x[:end], y[:end], diverged=bool(bad.size))


@dataclass(frozen=True)
class Band:
    """Median and spread over runs at each x."""

    x: Array
    middle: Array
    low: Array
    high: Array


def band(runs: Sequence[Series], clocks: Sequence[Series] | None = None) -> Band:
    """Median and spread of curves: min to max, from five runs on the quartiles.

    `clocks` are the times of each run against the x of `runs`. With them, the result is over time:
    the values at a step are drawn at the median time of that step. (Runs that are compared at equal
    times end at different steps, and the last part of the curve would be that of the slowest run.)

    Each run is interpolated linearly between its own points, never beyond them. The band ends where
    fewer than half of the runs continue: the median of a minority would be that of the survivors.
    """
    total = len(runs)
    empty = np.empty(0)
    runs = [run for run in runs if run.x.size]
    if not runs:
        return Band(empty, empty, empty, empty)
    x = _thinned(np.unique(np.concatenate([run.x for run in runs])))
    values = _at(x, runs)
    enough = 2 * np.count_nonzero(~np.isnan(values), axis=0) >= total
    x, values = x[enough], values[:, enough]
    if not x.size:
        return Band(empty, empty, empty, empty)
    spread = (25, 75) if total >= QUARTILES_FROM else (0, 100)
    low, middle, high = np.nanpercentile(values, (spread[0], 50, spread[1]), axis=0)
    if clocks is not None:
        x = np.maximum.accumulate(
            np.nanmedian(_at(x, [clock for clock in clocks if clock.x.size]), 0)
        )
    return Band(x, middle, low, high)


def _at(x: Array, runs: Sequence[Series]) -> Array:
    return np.stack([np.interp(x, run.x, run.y, left=np.nan, right=np.nan) for run in runs])


def _thinned(x: Array) -> Array:
    if x.size <= MAX_POINTS:
        return x
    kept: Array = x[np.linspace(0, x.size - 1, MAX_POINTS).round().astype(int)]
    return kept
