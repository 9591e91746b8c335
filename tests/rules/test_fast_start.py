"""The fast start of the diagonal methods: β₂ is max(β₂, 5/(t + 6)) at step t."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rootfree
from rootfree.rules import diagonal
from rootfree.shell import gradients as gradients_of_steps
from rootfree.shell.step_counts import LONG_AGO

B, BETA2, LAM, STEPS = 8, 0.05, 1e-3, 120  # 5/(t + 6) is β₂ at t = 94

METHODS: dict[str, tuple[type[rootfree.RootFreeOptimizer], dict[str, Any]]] = {
    "RFRMSprop": (rootfree.RFRMSprop, {"precond_lr": BETA2}),
    "RFAdamW": (rootfree.RFAdamW, {"betas": (0.9, 1 - BETA2)}),
}


@pytest.fixture(params=METHODS)
def make(request):
    method, options = METHODS[request.param]
    return lambda ps, **more: method(ps, **{"batch_size": B, "damping": LAM, **options, **more})


def gradients(*shape: int, scale: float = 0.01) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [scale * rng.normal(size=shape) for _ in range(STEPS)]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=torch.float64))


def weighted_mean(squares: list[np.ndarray]) -> np.ndarray:
    """s after the steps 0..t: ∏(1 - 5/(i + 6)) = ∏(i + 1)/(i + 6) telescopes to products of five.

    The square of step i has the weight 5(i + 2)(i + 3)(i + 4)(i + 5), the start s = 1 that of 5!,
    both over (t + 2)(t + 3)(t + 4)(t + 5)(t + 6).
    """
    t = len(squares) - 1
    total = np.full_like(squares[0], 120.0)
    for i, square in enumerate(squares):
        total += 5 * (i + 2) * (i + 3) * (i + 4) * (i + 5) * square
    return total / ((t + 2) * (t + 3) * (t + 4) * (t + 5) * (t + 6))


def test_the_first_squares_have_the_weights_of_the_closed_form(make, monkeypatch):
    """To rounding, and a start of 4 or 6 would be seen."""

    def worst() -> float:
        p = parameter(3)
        optimizer = make([p], max_update=None)
        squares, off = [], 0.0
        for t, g in enumerate(gradients(3)):
            p.grad = torch.tensor(g)
            optimizer.step()
            squares.append(B * g**2)
            if t < 90:
                s, expected = optimizer.state[p]["preconditioner"].numpy(), weighted_mean(squares)
                off = max(off, float(np.abs(s / expected - 1).max()))
        return off

    assert worst() < 1e-12  # 90 steps of a few roundings of 1e-16 each
    for other in (4, 6):
        monkeypatch.setattr(diagonal, "START", other)
        assert worst() > 0.1


def test_it_is_a_rate_that_changes_from_step_to_step():
    """The same trajectory, to rounding, as with a rate that is set before each step."""
    ps = [parameter(5), parameter(5)]
    fast = rootfree.RFRMSprop(ps[:1], batch_size=B, precond_lr=BETA2)
    by_hand = rootfree.RFRMSprop(ps[1:], batch_size=B, fast_start=False)
    for t, g in enumerate(gradients(5)):
        by_hand.param_groups[0]["precond_lr"] = max(BETA2, 5 / (t + 6))
        for p, optimizer in zip(ps, (fast, by_hand), strict=True):
            p.grad = torch.tensor(g)
            optimizer.step()
    torch.testing.assert_close(*ps, rtol=1e-12, atol=0)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_the_rate_is_the_same_where_the_host_does_not_read_the_count(make, precision, monkeypatch):
    """As on a GPU: a tensor of rates takes the place of one number, to rounding."""
    ps = [nn.Parameter(torch.ones(5, dtype=precision)) for _ in range(2)]
    with_host, without = make(ps[:1]), make(ps[1:])
    for g in gradients(5):
        for p, optimizer, reads in zip(ps, (with_host, without), (True, False), strict=True):
            monkeypatch.setattr(gradients_of_steps, "host_reads", lambda device, r=reads: r)
            p.grad = torch.tensor(g, dtype=precision)
            optimizer.step()
    # a few roundings in each of 120 steps
    torch.testing.assert_close(*ps, rtol=600 * torch.finfo(precision).eps, atol=0)


def test_every_parameter_has_a_start_of_its_own(make):
    """One that gets its gradients later is where it would be alone."""
    both, alone = [parameter(3), parameter(3)], parameter(3)
    one, other = make(both), make([alone])
    for t, g in enumerate(gradients(3)[:40]):
        both[0].grad = torch.tensor(g)
        if t >= 10:
            both[1].grad, alone.grad = torch.tensor(g), torch.tensor(g)
            other.step()
        one.step()
    assert [int(one.state[p]["step"]) for p in both] == [40, 30]
    torch.testing.assert_close(both[1], alone, rtol=1e-13, atol=0)
    assert not torch.equal(*both)


def test_a_preconditioner_that_never_moves_has_no_start():
    p = parameter(3)
    optimizer = rootfree.RFRMSprop([p], batch_size=B, precond_lr=0.0)
    p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["preconditioner"], torch.ones_like(p))


def test_no_element_of_an_average_is_above_its_limit():
    """s falls to a sixth in the first step; what the average has from before falls with it."""
    c, lr = 0.03, 1.0
    p = parameter(3)
    optimizer = rootfree.RFAdamW([p], lr=lr, batch_size=B, damping=LAM, max_update=c)
    for g in gradients(3, scale=0.1)[:30]:
        p.grad, before = torch.tensor(g), p.detach().clone()
        optimizer.step()
        assert ((p.detach() - before).abs() <= lr * c * (1 + 1e-12)).all()


def going_on(former, make, way: str):
    """An optimizer with the state of `former` without its counts, by one of the ways there are."""
    old = deepcopy(former)
    for row in old.state.values():
        del row["step"]
    for group in (*old.param_groups, old.defaults):
        del group["fast_start"]
    if way == "pickled":
        return pickle.loads(pickle.dumps(old))
    (p,) = old.param_groups[0]["params"]
    optimizer = make([("w", nn.Parameter(p.detach().clone()))])
    new, saved = optimizer.state_dict(), old.state_dict()
    (q,) = optimizer.param_groups[0]["params"]
    if way == "put into the state":
        optimizer.state[q] = saved["state"][0]
        return optimizer
    if way != "loaded":
        saved["param_groups"] = new["param_groups"]
    if way == "what it lacks is new":  # torch's checkpoint functions do that
        saved["state"] = {0: new["state"][0] | saved["state"][0]}
    optimizer.load_state_dict(saved)
    return optimizer


WAYS = ["loaded", "its groups are new", "what it lacks is new", "put into the state", "pickled"]


@pytest.mark.parametrize("way", WAYS)
def test_state_from_before_there_were_counts_has_its_start_behind_it(make, way):
    """5/6 of its s would be lost to the next gradient; a parameter that is added has a start."""
    p, later = parameter(3), parameter(3)
    former = make([("w", p)], fast_start=False)
    for g in gradients(3)[:20]:
        p.grad = torch.tensor(g)
        former.step()
    optimizer = going_on(former, make, way)
    (q,) = optimizer.param_groups[0]["params"]
    for g in gradients(3)[20:30]:
        p.grad, q.grad = torch.tensor(g), torch.tensor(g)
        former.step(), optimizer.step()
    assert torch.equal(p, q)
    optimizer.add_param_group({"params": [("later", later)]})
    later.grad = torch.zeros_like(later)
    optimizer.step()
    s = optimizer.state[later]["preconditioner"]
    torch.testing.assert_close(s, torch.full_like(s, 1 / 6), rtol=1e-12, atol=0)
    assert [int(optimizer.state[each]["step"]) for each in (q, later)] == [LONG_AGO + 11, 1]
