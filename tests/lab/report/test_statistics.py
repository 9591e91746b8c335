"""Statistics over seeds against slow formulas, written out in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootfree_lab.report.statistics import MAX_POINTS, Series, band, median, series, summary

values = st.floats(-1e3, 1e3)


def slow_quantile(numbers: list[float], share: float) -> float:
    ordered = sorted(numbers)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def slow_value(x: list[float], y: list[float], at: float) -> float | None:
    for i in range(len(x) - 1):
        if x[i] <= at <= x[i + 1]:
            return y[i] + (y[i + 1] - y[i]) * (at - x[i]) / (x[i + 1] - x[i])
    return y[0] if len(x) == 1 and x[0] == at else None


def line(x: list[float], y: list[float]) -> Series:
    return series(np.array(x, dtype=float), np.array(y, dtype=float))


@given(st.lists(values | st.just(math.nan) | st.just(math.inf), max_size=8))
def test_summary(numbers):
    finite = [number for number in numbers if math.isfinite(number)]
    found = summary(numbers)
    assert found.count == len(finite)
    if not finite:
        assert math.isnan(found.mean)
        assert math.isnan(median(numbers))
        return
    mean = sum(finite) / len(finite)
    assert found.mean == pytest.approx(mean, abs=1e-9)
    assert median(numbers) == pytest.approx(slow_quantile(finite, 0.5), abs=1e-9)
    if len(finite) == 1:
        assert math.isnan(found.deviation)
    else:
        squares = sum((number - mean) ** 2 for number in finite)
        assert found.deviation == pytest.approx(math.sqrt(squares / (len(finite) - 1)), abs=1e-9)


@given(st.integers(1, 7), st.randoms(use_true_random=False))
def test_band(count, chance):
    """Runs with points of their own and of different length."""
    runs = []
    for _ in range(count):
        length = chance.randint(1, 9)
        x = sorted(chance.sample(range(30), length))
        runs.append((list(map(float, x)), [chance.uniform(-5, 5) for _ in x]))
    found = band([line(x, y) for x, y in runs])
    low, high = (0.25, 0.75) if count >= 5 else (0, 1)
    expected = []
    for at in sorted({place for x, _ in runs for place in x}):
        there = [v for v in (slow_value(x, y, at) for x, y in runs) if v is not None]
        if 2 * len(there) >= count:
            expected.append([at, *(slow_quantile(there, q) for q in (0.5, low, high))])
    got = np.stack([found.x, found.middle, found.low, found.high], axis=1)
    np.testing.assert_allclose(got, np.array(expected).reshape(-1, 4), atol=1e-9)


def test_a_band_ends_where_fewer_than_half_of_the_runs_are_left():
    runs = [line([1, 2], [5, 4]), line([1, 2], [5, 4]), line([1, 2, 3], [5, 4, 3])]
    assert band(runs).x.tolist() == [1, 2]
    assert band(runs[1:]).x.tolist() == [1, 2, 3]


def test_a_band_over_time_is_the_one_over_steps_at_median_times():
    runs = [line([10, 20], [4, 2]), line([10, 20], [5, 3]), line([10, 20], [9, 1])]
    clocks = [line([10, 20], [1, 2]), line([10, 20], [1.5, 3]), line([10, 20], [7, 9])]
    found = band(runs, clocks)
    assert found.x.tolist() == [1.5, 3]
    assert found.middle.tolist() == [5, 2]
    assert (found.low.tolist(), found.high.tolist()) == ([4, 1], [9, 3])


def test_no_runs_make_an_empty_band():
    assert band([]).x.size == 0
    assert band([line([], [])]).x.size == 0


def test_series_orders_skips_the_missing_and_stops_at_what_is_no_number():
    found = line([3, 1, math.nan, 2, 4, 5], [30, 10, 0, math.nan, math.inf, 50])
    assert (found.x.tolist(), found.y.tolist(), found.diverged) == ([1, 3], [10, 30], True)
    assert not line([1], [1]).diverged


def test_long_curves_are_thinned_and_keep_their_ends():
    x = np.arange(10_000.0)
    found = band([series(x, x)])
    assert found.x.size == MAX_POINTS
    assert (found.x[0], found.x[-1]) == (0, 9_999)
