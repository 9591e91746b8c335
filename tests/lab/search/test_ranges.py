"""Ranges and choices: draws, narrowing, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.search.spaces import Choice, Range, parse


def _range(scale: str, ends: tuple[float, float]) -> Range:
    low, high = sorted(ends)
    if scale == "log":
        return Range(10**low, 10**high * 1.01, scale)
    if scale == "complement":
        return Range(1 - 10 ** (-low / 3), 1 - 10 ** (-high / 3) / 1.01, scale)
    return Range(low, high + 1, scale)


ranges = st.builds(
    _range,
    st.sampled_from(["log", "linear", "complement"]),
    st.tuples(st.floats(0, 9), st.floats(0, 9)),
)
fractions = st.floats(0, 1, exclude_max=True)


@given(ranges, fractions)
def test_a_draw_is_inside(allowed, fraction):
    assert allowed.low <= allowed.at(fraction) <= allowed.high


@given(ranges, fractions, st.floats(0.01, 1))
def test_a_narrowed_range_is_inside_and_has_the_best(allowed, fraction, share):
    best = allowed.at(fraction)
    narrow = allowed.narrowed(best, share)
    assert allowed.low <= narrow.low <= best <= narrow.high <= allowed.high
    assert narrow.low < narrow.high
    assert parse("again", narrow.as_table()) == narrow


@given(st.floats(-9, 0), st.floats(1, 6), fractions, st.floats(0.05, 1))
def test_a_narrowed_range_has_its_share_of_the_decades(low, decades, fraction, share):
    allowed = Range(10**low, 10 ** (low + decades))
    narrow = allowed.narrowed(allowed.at(fraction), share)
    # Four digits: an end is off by 5e-4 of itself at most, twice that in all.
    assert math.log10(narrow.high / narrow.low) == pytest.approx(share * decades, abs=1e-3)


def test_draws_are_uniform_on_the_scale():
    assert Range(1e-4, 1e-2).at(0.5) == pytest.approx(1e-3)
    assert Range(1.0, 3.0, "linear").at(0.5) == pytest.approx(2.0)
    assert Range(0.0, 0.99, "complement").at(0.5) == pytest.approx(0.9)
    assert [Choice((1, 2)).at(f) for f in (0.0, 0.49, 0.5, 0.999)] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([0.1, 0.01], "low < high"),
        ([0.1, 0.1], "low < high"),
        ([0.0, 1.0], "must be positive"),
        ([1, 2, 3], "must be [low, high]"),
        ([], "must be [low, high]"),
        (0.1, "must be [low, high]"),
        (["a", 1], "low must be a number"),
        ([1, float("inf")], "high must be a number"),
        ({"low": 1, "high": 2, "scale": "logg"}, "did you mean 'log'"),
        ({"low": 1, "high": 2, "step": 1}, "'step' is unknown"),
        ({"low": 0.1, "high": 1.0, "scale": "complement"}, "below 1"),
        ({"choices": []}, "a list with values"),
        ({"choices": [1, 1]}, "must differ"),
        ({"choices": [[1]]}, "a choice must be"),
    ],
)
def test_what_is_no_range_is_refused(given, said):
    with pytest.raises(ConfigError) as error:
        parse("search.spaces.AdamW.lr", given)
    assert said in str(error.value)
    assert "search.spaces.AdamW.lr" in str(error.value)
