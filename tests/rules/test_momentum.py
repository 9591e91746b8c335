"""The tail of a step: the cap on the size of a direction."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rootfree
from rootfree.rules.momentum import Tail, cap_rms_, descend_

INF, NAN = math.inf, math.nan


def rms(u: Tensor) -> float:
    return u.double().square().mean().sqrt().item()


@pytest.mark.parametrize(
    "values",
    [
        [1e20, -1e20, 1e20],  # the squares leave fp32
        [3e38, 3e38, -3e38],  # so does their root mean square times the number of elements
        [1e20, 1.0, 0.0],
        [INF, 1.0, -2.0],
        [-INF, INF, INF],
    ],
    ids=str,
)
def test_directions_without_measure_are_scaled_to_the_cap(values):
    u, untouched = torch.tensor(values), torch.tensor([0.1, -0.2, 0.3])
    before, signs = untouched.clone(), u.sign()
    cap_rms_([u, untouched], cap=0.5)
    assert rms(u) == pytest.approx(0.5, rel=1e-6)
    assert torch.equal(untouched, before)
    largest = torch.tensor(values).abs() == max(map(abs, values))
    assert torch.equal(u.sign()[largest], signs[largest])


def test_float64_directions_too():
    for values in ([1e200, -1e200], [INF, 1.0]):
        u = torch.tensor(values, dtype=torch.float64)
        cap_rms_([u], cap=2.0)
        assert rms(u) == pytest.approx(2.0, rel=1e-14)


def test_nan_stays_nan_and_hurts_nobody_else():
    u, other = torch.tensor([NAN, 1.0]), torch.tensor([3.0, 4.0])
    cap_rms_([u, other], cap=1.0)
    assert u.isnan().any()
    assert rms(other) == pytest.approx(1.0, rel=1e-6)


def test_what_is_below_the_cap_is_left_bit_for_bit():
    u = torch.tensor([1e-30, 0.7, -0.2])
    before = u.clone()
    cap_rms_([u], cap=1.0)
    assert torch.equal(u, before)
    zero = torch.zeros(3)
    cap_rms_([zero], cap=1.0)
    assert torch.equal(zero, torch.zeros(3))


def test_the_cap_is_on_the_direction_before_momentum_and_decay():
    p, m = torch.tensor([1.0, 1.0]), torch.zeros(2)
    tail = Tail(0.5, 0.9, kappa=0.2, nesterov=False, decoupled=False, cap=1.0)
    descend_([p], [m], [torch.tensor([INF, INF])], tail)
    torch.testing.assert_close(m, torch.tensor([1.2, 1.2]))
    torch.testing.assert_close(p, torch.tensor([0.4, 0.4]))


# --- through an optimizer ----------------------------------------------------------------------

# The preconditioner stands still at one: the direction is the gradient.
STILL: dict[str, Any] = {
    "nonfinite": "propagate",
    "lr": 1.0,
    "batch_size": 1,
    "precond_lr": 0.0,
    "momentum": 0.9,
    "max_update_rms": 0.5,
    "nesterov": False,
    "update_every": 1000,
}
BARE: dict[str, Any] = {**STILL, "safeguard": False}
METHODS = {
    "RFFullAdagrad": lambda ps: rootfree.RFFullAdagrad(ps, **BARE),
    "RFShampoo": lambda ps: rootfree.RFShampoo(ps, **STILL),
    "IFShampoo": lambda ps: rootfree.IFShampoo(ps, init_scale=1.0, **STILL),
    "IFFullAdagrad": lambda ps: rootfree.IFFullAdagrad(ps, **BARE),
    "IFFullAdagrad-covariance": lambda ps: rootfree.IFFullAdagrad(ps, form="covariance", **BARE),
}


@pytest.mark.parametrize("size", [1e20, INF], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_as_large_as_the_cap(method, size):
    """One element, so that an infinite one meets no zero in a product."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = METHODS[method]([p])
    p.grad = torch.ones(1)
    optimizer.step()  # the refresh; the next one is far away
    before = p.detach().clone()
    optimizer.state[p]["momentum"].zero_()
    p.grad = torch.tensor([size])
    optimizer.step()
    assert (before - p).item() == pytest.approx(0.5, rel=1e-6)
    assert torch.isfinite(optimizer.state[p]["momentum"]).all()
    p.grad = torch.tensor([NAN])
    optimizer.step()
    assert p.isnan().all()


@pytest.mark.parametrize("method", METHODS)
def test_many_elements_of_1e20(method):
    p = nn.Parameter(torch.zeros(4, 3))
    optimizer = METHODS[method]([p])
    p.grad = torch.ones(4, 3)
    optimizer.step()
    optimizer.state[p]["momentum"].zero_()
    before = p.detach().clone()
    p.grad = torch.full((4, 3), 1e20)
    optimizer.step()
    assert rms(before - p) == pytest.approx(0.5, rel=1e-6)
