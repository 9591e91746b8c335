"""When the preconditioner is refreshed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import rootfree
from rootfree.shell.schedules import (
    logarithmic,
    refresh_interval,
    schedule,
    steps_between,
    warm,
)


def odd(step: int) -> int:
    """Named in the tests as 'test_schedules:odd': truthy, not a bool."""
    return step % 2


def not_a_schedule() -> bool:
    return True


def repr_without_address(value) -> str:
    """The ids of a test must be the same in every worker."""
    return "a function" if callable(value) else repr(value)


def due(function, steps: int) -> list[int]:
    return [t for t in range(steps) if function(t)]


def test_every():
    assert due(schedule(1), 4) == [0, 1, 2, 3]
    assert due(schedule(3), 10) == [0, 3, 6, 9]


def test_logarithmic_is_every_step_at_first_and_then_ever_more_rarely():
    steps = due(logarithmic(), 5000)
    assert steps[:16] == list(range(16))  # ⌊log₄ t⌋ is at most one below 16
    assert [t for t in steps if 16 <= t < 24] == [16, 18, 20, 22]
    assert [t for t in steps if 64 <= t < 73] == [66, 69, 72]
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps[-10:]) == 6  # 4⁶ = 4096


@pytest.mark.parametrize("power", range(1, 13))
def test_logarithmic_changes_exactly_at_powers_of_four(power):
    """math.log(4**3, 4) is 2.9999..: the interval must not be late by a step."""
    first = 4**power
    interval = power
    assert logarithmic()(first) == (first % interval == 0)
    before = max(1, power - 1)
    assert logarithmic()(first - 1) == ((first - 1) % before == 0)


def test_warm_is_every_step_of_the_first_and_then_every_t_th():
    assert due(warm(3), 40) == [*range(30), 30, 33, 36, 39]
    assert due(warm(1), 20) == list(range(20))


@pytest.mark.parametrize(
    ("option", "T"), [(7, 7), ("warm:7", 7), ("logarithmic:7", 1), ("test_schedules:odd", 1)]
)
def test_how_many_steps_a_refresh_stands_for(option, T):
    assert steps_between(option) == T


def test_whitening_moves_as_far_by_a_warm_refresh_as_by_one_of_every_t_th():
    states = []
    for update_every in (5, "warm:5", 1):
        p = nn.Parameter(torch.ones(2, 3))
        optimizer = rootfree.IFWhitening([p], update_every=update_every, fast_start=False)
        p.grad = torch.arange(6.0).view(2, 3)
        optimizer.step()
        states.append(optimizer.state[p]["block0.factor0"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[1], states[2])


def test_logarithmic_has_a_limit():
    assert due(logarithmic(2), 5000)[-3:] == [4994, 4996, 4998]
    assert due(logarithmic(1), 100) == list(range(100))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (2, [0, 2, 4, 6]),
        ("logarithmic", list(range(8))),
        ("logarithmic:1", list(range(8))),
        ("warm:2", list(range(8))),
        ("test_schedules:odd", [1, 3, 5, 7]),
    ],
)
def test_options(option, expected):
    assert refresh_interval("update_every", option) == option
    assert due(schedule(option), 8) == expected
    assert schedule(option)(1) in (True, False)


@pytest.mark.parametrize(
    "wrong",
    [
        0,
        -1,
        True,
        2.0,
        None,
        "",
        "often",
        "logarithmic:0",
        "warm",
        "warm:0",
        "warm:x",
        "logarithmic:x",
        "logarithmic:-3",
        "no.such.module:f",
        "test_schedules:missing",
        "test_schedules:not_a_schedule",
        lambda t: True,
    ],
    ids=repr_without_address,
)
def test_wrong_options_are_refused_with_the_allowed_ones(wrong):
    with pytest.raises((TypeError, ValueError), match="update_every must be a positive integer T"):
        refresh_interval("update_every", wrong)


@pytest.mark.parametrize(
    ("option", "expected"), [(3, [0, 3, 6]), ("test_schedules:odd", [1, 3, 5, 7])]
)
def test_factors_move_when_it_is_due_and_the_count_survives_a_checkpoint(option, expected):
    def make() -> rootfree.IFShampoo:
        p = nn.Parameter(torch.ones(3, 2))
        return rootfree.IFShampoo([p], batch_size=1, update_every=option, init_scale=1.0)

    optimizer, moved = make(), []
    for t in range(8):
        if t == 4:
            resumed = make()
            resumed.load_state_dict(optimizer.state_dict())
            optimizer = resumed
        (p,) = optimizer.param_groups[0]["params"]
        before = optimizer.state[p]["block0.factor0"].clone()
        p.grad = torch.arange(6.0).view(3, 2) + t
        optimizer.step()
        if not torch.equal(before, optimizer.state[p]["block0.factor0"]):
            moved.append(t)
    assert moved == expected
