"""The fast start of the diagonal methods: β₂ is max(β₂, 5/(t + 6)) at step t."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rootfree
from rootfree.rules import diagonal

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


def test_a_checkpoint_from_before_there_was_one_goes_on_without(make):
    """Its s has long forgotten the start, and 5/6 of it would be lost to the next gradient."""
    p, q = parameter(3), parameter(3)
    former, optimizer = make([p], fast_start=False), make([q])
    for g in gradients(3)[:20]:
        p.grad = torch.tensor(g)
        former.step()
    saved = deepcopy(former.state_dict())
    del saved["param_groups"][0]["fast_start"], saved["state"][0]["step"]
    q.data.copy_(p.data)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["fast_start"] is False
    for g in gradients(3)[20:30]:
        p.grad, q.grad = torch.tensor(g), torch.tensor(g)
        former.step(), optimizer.step()
    assert torch.equal(p, q)
