"""Factors are kept at one scale by powers of two, which change nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rootfree
import tool_scripts
from rootfree.rules import if_shampoo, rf_shampoo
from rootfree.rules.if_shampoo import exponents

METHODS = {
    "IFShampoo": (rootfree.IFShampoo, {"batch_size": 8}),
    "RFShampoo": (rootfree.RFShampoo, {"batch_size": 8}),
    "IFWhitening": (rootfree.IFWhitening, {}),
    "IFShampoo-bf16": (
        rootfree.IFShampoo,
        {"batch_size": 8, "factor_dtype": torch.bfloat16, "matmul_dtype": torch.bfloat16},
    ),
    "IFShampoo-fp16": (rootfree.IFShampoo, {"batch_size": 8, "matmul_dtype": torch.float16}),
}


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=5))
def test_exponents_sum_to_zero_and_bring_sizes_together(logs):
    means = [torch.tensor([2.0 ** (2 * log), 1.0], dtype=torch.float64) for log in logs]
    found = torch.stack(exponents(means))
    assert torch.equal(found, found.round())
    assert found.sum(0).abs().max() == 0
    balanced = torch.tensor(logs, dtype=torch.float64) + found[:, 0]
    # Each is within one half of the mean, but for those that made the sum zero.
    assert (balanced.max() - balanced.min()) < (1 + 1e-9 if len(logs) == 2 else 1.5 + 1e-9)
    assert found[:, 1].abs().max() == 0


def test_no_exponents_for_what_is_no_number():
    means = [torch.tensor([0.0, torch.inf, torch.nan]), torch.ones(3)]
    assert torch.stack(exponents(means)).isfinite().all()


def run(method, options, shape, steps, *, start=None):
    p = nn.Parameter(torch.ones(shape))
    optimizer = method([p], **options)
    if start is not None:
        start(optimizer.state[p])
    generator = torch.Generator().manual_seed(0)
    states = []
    for _ in range(steps):
        p.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        states.append(p.detach().clone())
    return torch.stack(states), optimizer.state[p]


def ratio(state) -> float:
    """The largest ratio of the factors' scales in a block."""
    (found,) = tool_scripts.load("long_runs").scales(state)
    return float((found.amax(0) / found.amin(0)).max())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(2, 6), (5, 3, 4)], ids=str)
def test_trajectories_are_bit_identical_without_it(name, shape, monkeypatch):
    method, options = METHODS[name]
    options = {**options, "update_every": 1, "lr": 1e-3, "block_size": None}
    steps = 1000 if shape == (2, 6) else 400
    balanced, state = run(method, options, shape, steps)

    def nothing(means):
        return [torch.zeros_like(mean) for mean in means]

    for module in (if_shampoo, rf_shampoo):
        monkeypatch.setattr(module, "exponents", nothing)
    drifted, other = run(method, options, shape, steps)
    assert torch.equal(balanced, drifted)
    assert ratio(state) < 4
    # And there was something to balance.
    if shape == (2, 6):
        assert ratio(other) > ratio(state)


@pytest.mark.parametrize("name", ["IFShampoo", "RFShampoo", "IFWhitening"])
def test_an_unbalanced_checkpoint_heals_at_the_first_refresh(name):
    method, options = METHODS[name]
    options = {**options, "lr": 1e-3}

    def unbalance(state):
        power = 2.0**-20 if name == "RFShampoo" else 2.0**10
        for key, factor in (("factor0", power), ("factor1", 1 / power)):
            state[f"block0.{key}"] *= factor
        if name == "RFShampoo":
            for key, factor in (("inverse0", 1 / power), ("inverse1", power)):
                state[f"block0.{key}"] *= factor

    healthy, _ = run(method, options, (4, 6), 3)
    healed, state = run(method, options, (4, 6), 3, start=unbalance)
    assert torch.equal(healthy, healed)
    assert ratio(state) < 4
