"""The checks of hyper-parameters: what passes, what is stored, what an error says."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rootfree
from rootfree.shell import checks
from rootfree.shell.checks import OneOf, Optional, Real
from rootfree.shell.options import HEAVY_BALL_OPTIONS


def refused(check, value, *parts: str, error: type[Exception] = ValueError) -> None:
    """The check raises, and the message has the argument's name, the value, and each part."""
    with pytest.raises(error) as caught:
        check("the_argument", value)
    message = str(caught.value)
    assert message.startswith("the_argument")
    for part in ("must", *parts):
        assert part in message


# --- real numbers -------------------------------------------------------------------------------


@given(low=st.floats(-5, 5), width=st.floats(0, 5), value=st.floats(), open_high=st.booleans())
def test_real_passes_exactly_the_interval(low, width, value, open_high):
    high = low + width
    inside = low <= value < high or (value == high and not open_high)
    check = Real(low, high, open_high)
    if inside:
        assert check("the_argument", value) == value
    else:
        refused(check, value, repr(value), f"{low:g}", f"{high:g}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-300])
def test_real_is_finite_and_by_default_not_negative(value):
    refused(Real(), value, "in [0, inf)", f"got {value!r}")


def test_real_says_which_ends_belong():
    assert str(Real(high=1.0)) == "[0, 1]"
    assert str(Real(high=1.0, open_high=True)) == "[0, 1)"
    assert str(Real(low=-0.5)) == "[-0.5, inf)"
    refused(Real(high=1.0, open_high=True), 1.0, "in [0, 1)", "got 1.0")


@pytest.mark.parametrize("value", [1, np.float32(1), np.int64(1), Fraction(1)])
def test_real_stores_a_plain_float(value):
    assert type(Real()("the_argument", value)) is float
    assert Real()("the_argument", value) == 1.0


@pytest.mark.parametrize("value", ["0.1", None, True, 1j, [0.1], torch.tensor(0.1)], ids=repr)
def test_real_is_a_number(value):
    kind = type(value).__name__
    refused(Real(), value, "a real number", repr(value), f"({kind})", error=TypeError)


# --- learning rates -----------------------------------------------------------------------------


def test_learning_rate_keeps_the_very_tensor():
    for lr in (torch.tensor(0.1), torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64)):
        assert checks.learning_rate("lr", lr) is lr
    assert checks.learning_rate("lr", 0.1) == 0.1


def test_learning_rate_tensors_hold_one_number_in_range():
    refused(checks.learning_rate, torch.ones(2), "one floating-point number", "shape (2,)")
    refused(checks.learning_rate, torch.ones(0), "one floating-point number", "shape (0,)")
    refused(checks.learning_rate, torch.tensor(1), "one floating-point number", "torch.int64")
    refused(checks.learning_rate, torch.tensor(-0.5), "[0, inf)", "-0.5")
    refused(checks.learning_rate, torch.tensor(math.nan), "[0, inf)", "nan")
    refused(checks.learning_rate, -0.5, "[0, inf)", "-0.5")


# --- the others ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, np.int32(7), torch.tensor(7), 10**9])
def test_positive_integer_stores_a_plain_integer(value):
    assert type(checks.positive_integer("the_argument", value)) is int
    assert checks.positive_integer("the_argument", value) == value


def test_positive_integer_refuses():
    for value in (0, -1, np.int64(0)):
        refused(checks.positive_integer, value, "a positive integer", repr(value))
    for value in (1.0, 2.5, "8", None, True, math.nan, torch.tensor(2.0)):
        refused(checks.positive_integer, value, "a positive integer", repr(value), error=TypeError)


def test_boolean():
    assert checks.boolean("the_argument", True) is True
    assert checks.boolean("the_argument", False) is False
    for value in (0, 1, "yes", None):
        refused(checks.boolean, value, "True or False", repr(value), error=TypeError)


def test_averaging_pair():
    pair = checks.averaging_pair("betas", [0, np.float64(0.99)])
    assert pair == (0.0, 0.99)
    assert type(pair) is tuple
    assert [type(number) for number in pair] == [float, float]
    for value in (0.9, (0.9,), (0.9, 0.9, 0.9), None, "ab", {0.1, 0.2}):
        refused(checks.averaging_pair, value, "a pair of numbers", repr(value), error=TypeError)
    with pytest.raises(ValueError, match=r"betas\[0\] must be in \[0, 1\), got -0.1"):
        checks.averaging_pair("betas", (-0.1, 0.9))
    with pytest.raises(ValueError, match=r"betas\[1\] must be in \[0, 1\), got 1.0"):
        checks.averaging_pair("betas", (0.1, 1.0))
    with pytest.raises(TypeError, match=r"betas\[1\] must be a real number, got 'a' \(str\)"):
        checks.averaging_pair("betas", (0.1, "a"))


def test_one_of():
    check = OneOf(("frobenius", "spectral"))
    assert check("the_argument", "spectral") == "spectral"
    refused(check, "nuclear", "'frobenius', 'spectral'", "got 'nuclear'")


def test_optional():
    check = Optional(Real(high=1.0))
    assert check("the_argument", None) is None
    assert check("the_argument", 1) == 1.0
    refused(check, 2.0, "[0, 1]", "got 2.0")


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        ("lr", [0.0, 10.0], [-1.0]),
        ("batch_size", [None, 1, 10**6], [0, 0.5]),
        ("precond_lr", [0.0, 1.0], [-0.01, 1.01]),
        ("momentum", [0.0, 0.999], [-0.01, 1.0]),
        ("nesterov", [False, True], [0, None]),
        ("decoupled_weight_decay", [False, True], [1, "yes"]),
        ("betas", [(0.0, 0.999)], [(0.0, 1.0)]),
        ("damping", [0.0, 1e3], [-1e-9]),
        ("weight_decay", [0.0, 1e3], [-1e-9]),
        ("state_dtype", [None, torch.float32, torch.bfloat16], [torch.float16, torch.int8]),
    ],
)
def test_ranges_of_the_options_that_methods_share(option, good, bad):
    check = {**rootfree.RFAdamW.options, **HEAVY_BALL_OPTIONS}[option]
    for value in good:
        assert check(option, value) == value
    for value in bad:
        with pytest.raises((ValueError, TypeError), match=rf"^{option}.* must be"):
            check(option, value)
