"""Every matrix optimizer against its float64 oracle, and proof that the comparison bites."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rootfree
from rules.matrix_runs import (
    AGREES,
    METHODS,
    PLAIN,
    SCHEDULE,
    STRUCTURES,
    difference,
    if_shampoo,
)

INVERSE_FREE = ("IFFullAdagrad-factor", "IFShampoo")
SHAPES = [(), (1,), (5,), (3, 4), (1, 4), (3, 1, 2), (2, 3, 2), (2, 1, 3, 2, 2)]

# Everything at work: no term of the update vanishes, none drowns another.
BALANCED: dict[str, Any] = {
    "lr": 0.05,
    "batch_size": 100,
    "precond_lr": 0.1,
    "momentum": 0.8,
    "damping": 0.3,
    "weight_decay": 0.1,
    "nesterov": False,
    "decoupled_weight_decay": False,
    "gamma": 0.5,
    "update_every": 1,
    "update_rms": None,
    "max_update_rms": None,
}
INVERSE_FREE_BALANCED: dict[str, Any] = {
    "riemannian_momentum": 0.5,
    "factor_norm": "frobenius",
    "init_scale": 0.8,
}


def balanced(method: str) -> dict[str, Any]:
    words = dict(BALANCED)
    if method in INVERSE_FREE:
        words.update(INVERSE_FREE_BALANCED)
    if method == "IFFullAdagrad-covariance":
        words["factor_norm"] = "frobenius"
    if method == "IFShampoo":
        words["structure"] = "dense"
    return words


@pytest.fixture(params=METHODS)
def method(request) -> str:
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_axes(method, shape):
    assert difference(method, balanced(method), shape=shape) < AGREES


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.0},
        {"weight_decay": 0.0},
        {"damping": 0.0},
        {"damping": 0.0, "gamma": 0.0},
        {"damping": 0.0, "gamma": 1.0},
        {"gamma": 0.0},
        {"gamma": 1.0},
        {"update_every": 3},
        {"update_every": SCHEDULE},
        {"update_rms": 0.2},
        {"max_update_rms": 0.1},
        {"max_update_rms": 100.0},
        {"update_rms": 0.2, "max_update_rms": 0.1},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.0},
        {"decoupled_weight_decay": True},
        {"decoupled_weight_decay": True, "momentum": 0.0},
        {"nesterov": True, "decoupled_weight_decay": True, "max_update_rms": 0.1},
        {"nesterov": True, "update_rms": 0.2, "max_update_rms": 0.1},
    ],
    ids=str,
)
def test_every_option(method, changes):
    assert difference(method, {**balanced(method), **changes}, shape=(3, 4)) < AGREES


@pytest.mark.parametrize(
    "changes",
    [
        {"riemannian_momentum": 0.0},
        {"factor_norm": None},
        {"init_scale": 1.0},
        {"init_scale": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", INVERSE_FREE)
def test_every_option_of_the_inverse_free_methods(method, changes):
    # Without the norm a spike could throw the factors over: gradients of moderate size.
    scale = 0.05 if changes.get("factor_norm", "") is None else 0.3
    options = {**balanced(method), **changes}
    assert difference(method, options, shape=(3, 4), scale=scale) < AGREES


@pytest.mark.parametrize(
    "changes", [{"factor_norm": "frobenius"}, {"factor_norm": "spectral"}], ids=str
)
@pytest.mark.parametrize("start", [0.8, "gradient"])
def test_what_rf_shampoo_shares_with_the_inverse_free_one(changes, start):
    """The start and the norm of the change; the spikes among the gradients are beyond the norm."""
    options = {**balanced("RFShampoo"), "init_scale": start, **changes}
    assert difference("RFShampoo", options, shape=(3, 4)) < AGREES
    without = difference("RFShampoo", options, oracle_options={"factor_norm": None}, shape=(3, 4))
    assert without > 1e6 * AGREES


def test_covariance_form_without_the_norm():
    options = {**balanced("IFFullAdagrad-covariance"), "factor_norm": None}
    for damping in (0.0, 0.3):  # rank one, and any H
        options["damping"] = damping
        assert difference("IFFullAdagrad-covariance", options, scale=0.02) < AGREES


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2)], ids=str)
def test_start_from_the_gradient(shape):
    options = {**balanced("IFShampoo"), "init_scale": "gradient"}
    assert difference("IFShampoo", options, shape=shape, scale=0.01) < AGREES


def test_start_from_the_gradient_ignores_the_zeros_before_it():
    """An embedding row or an idle expert: its first gradient sets the scale, not the wait."""
    options = {
        **balanced("IFShampoo"),
        "init_scale": "gradient",
        "riemannian_momentum": 0.0,
        "gamma": 1.0,
    }
    start = np.ones((3, 4))
    oracle = if_shampoo(start, options)
    p = nn.Parameter(torch.tensor(start))
    optimizer = rootfree.IFShampoo([p], block_size=None, **{**PLAIN, **options})
    rng = np.random.default_rng(0)
    for t in range(30):
        g = np.zeros((3, 4)) if t < 20 else 0.01 * rng.normal(size=(3, 4))
        p.grad = torch.tensor(g)
        optimizer.step()
        expected = oracle.step(g)
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=AGREES)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("shape", [(5,), (1,), (5, 4), (2, 3, 4)], ids=str)
def test_every_structure(structure, shape):
    options = {**balanced("IFShampoo"), "structure": structure}
    assert difference("IFShampoo", options, shape=shape) < AGREES


@pytest.mark.parametrize(
    "structure",
    [
        ("lower_triangular", "diagonal"),
        ("hierarchical:1", "upper_toeplitz"),
        ("block_diagonal:3", "auto"),
        {1: "dense", 2: ("diagonal", "dense"), 3: "lower_toeplitz"},
        {2: "upper_triangular"},
        "auto",
    ],
    ids=str,
)
def test_mixed_structures(structure):
    options = {**balanced("IFShampoo"), "structure": structure}
    for shape in [(4, 5)] if isinstance(structure, tuple) else [(4,), (4, 5), (2, 3, 4)]:
        assert difference("IFShampoo", options, shape=shape) < AGREES, shape


def test_wrong_structure_is_seen():
    options = balanced("IFShampoo")
    for structure in STRUCTURES:
        for other in STRUCTURES:
            if other != structure:
                words = {**options, "structure": structure}
                off = difference(
                    "IFShampoo",
                    words,
                    shape=(6, 2),
                    steps=4,
                    oracle_options={"structure": other},
                )
                assert off > 1e6 * AGREES, (structure, other)


# --- open-ended options ------------------------------------------------------------------------

common_words = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.2),
        "batch_size": st.integers(1, 1000),
        "precond_lr": st.floats(1e-3, 0.2),
        "momentum": st.sampled_from([0.0, 0.5, 0.9]),
        "damping": st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
        "weight_decay": st.sampled_from([0.0, 1e-3, 0.1]),
        "gamma": st.sampled_from([0.0, 0.3, 0.7, 1.0]) | st.floats(0, 1),
        "update_every": st.sampled_from([1, 3, SCHEDULE]),
        "update_rms": st.sampled_from([None, 0.2]),
        "max_update_rms": st.sampled_from([None, 0.1, 10.0]),
        "nesterov": st.booleans(),
        "decoupled_weight_decay": st.booleans(),
    }
)
inverse_free_words = st.fixed_dictionaries(
    {
        "riemannian_momentum": st.sampled_from([0.0, 0.5, 0.9]),
        "factor_norm": st.just("frobenius"),
        "init_scale": st.floats(0.3, 3.0),
    }
)
shapes = st.lists(st.integers(1, 3), max_size=4).map(tuple)


# Factors with a condition number of 1e4 at the ends of these ranges: two digits more are lost.
LOOSE = 100 * AGREES


@settings(max_examples=15)
@given(
    words=common_words,
    inverse_free=inverse_free_words,
    structure=st.tuples(*[st.sampled_from(STRUCTURES)] * 4),
    shape=shapes,
    scale=st.floats(-2, 0).map(lambda exponent: 10**exponent),
    seed=st.integers(0, 2**31),
)
def check_agreement(method, words, inverse_free, structure, shape, scale, seed) -> None:
    if method in INVERSE_FREE:
        words = {**words, **inverse_free}
    if method == "IFFullAdagrad-covariance":
        words = {**words, "factor_norm": "spectral"}
    if method == "IFShampoo":
        axes = max(1, sum(d > 1 for d in shape))
        words["structure"] = structure[:axes]
    assert difference(method, words, shape=shape, scale=scale, seed=seed, steps=20) < LOOSE


def test_any_options(method):
    check_agreement(method)


# --- it bites ----------------------------------------------------------------------------------

PERTURBED = {
    "batch_size": 101,
    "damping": 0.303,
    "gamma": 0.505,
    "lr": 0.0505,
    "precond_lr": 0.101,
    "momentum": 0.808,
    "weight_decay": 0.101,
    "nesterov": True,
    "decoupled_weight_decay": True,
    "init_scale": 0.808,
    "riemannian_momentum": 0.505,
    "factor_norm": "spectral",
    "update_rms": 0.202,
    "max_update_rms": 0.0202,
}


def perturbable(method: str) -> list[str]:
    """The options of a method among `PERTURBED`."""
    return [
        name
        for name in PERTURBED
        if name.endswith("rms")
        or (name in balanced(method) and (name != "factor_norm" or method in INVERSE_FREE))
    ]


@pytest.mark.parametrize(("method", "name"), [(m, n) for m in METHODS for n in perturbable(m)])
def test_one_per_cent_more_of_anything_is_seen(method, name):
    """The agreement would fail a million times over if a constant were off by 1 %."""
    options = balanced(method)
    if name.endswith("rms"):
        options[name] = {"update_rms": 0.2, "max_update_rms": 0.02}[name]
    off = difference(method, options, scale=0.1, oracle_options={name: PERTURBED[name]})
    assert off > 1e6 * AGREES


def test_a_batch_size_that_changes_is_used_as_it_is(method):
    make, make_oracle = METHODS[method]
    options = balanced(method)
    start = np.ones((3, 2))
    oracle = make_oracle(start, options)
    p = nn.Parameter(torch.tensor(start))
    optimizer = make([p], **options)
    rng = np.random.default_rng(0)
    for batch in (8, 64, 1, 1000):
        g = 0.3 * rng.normal(size=(3, 2))
        optimizer.batch_size = oracle.batch_size = batch
        p.grad = torch.tensor(g)
        optimizer.step()
        np.testing.assert_allclose(p.detach().numpy(), oracle.step(g), rtol=AGREES)


@pytest.mark.parametrize("schedule", [(0.8, 0.0, 0.8), (0.0, 0.8, 0.0)], ids=str)
def test_momentum_is_turned_on_and_off_between_steps(method, schedule):
    """Whatever was there before, momentum that is turned on starts at zero."""
    make, make_oracle = METHODS[method]
    options = {**balanced(method), "momentum": schedule[0]}
    start = np.ones((3, 2))
    oracle = make_oracle(start, options)
    p = nn.Parameter(torch.tensor(start))
    optimizer = make([p], **options)
    rng = np.random.default_rng(0)
    for momentum in schedule:
        optimizer.param_groups[0]["momentum"] = oracle.momentum = momentum
        oracle.buffer = np.zeros_like(oracle.buffer)  # of no use where it is off
        for _ in range(4):
            g = 0.3 * rng.normal(size=(3, 2))
            p.grad = torch.tensor(g)
            optimizer.step()
            np.testing.assert_allclose(p.detach().numpy(), oracle.step(g), rtol=AGREES)


@pytest.mark.parametrize("gamma", [0.0, 1.0])
@pytest.mark.parametrize("schedule", [(0.0, 0.3), (0.3, 0.0), (0.0, 0.3, 0.0, 0.1)], ids=str)
def test_damping_is_turned_on_and_off_between_steps(method, schedule, gamma):
    """RFFullAdagrad keeps S⁻¹ alone without it: S goes on as the inverse of that."""
    make, make_oracle = METHODS[method]
    options = {**balanced(method), "damping": schedule[0], "gamma": gamma}
    start = np.ones(5)
    oracle = make_oracle(start, options)
    p = nn.Parameter(torch.tensor(start))
    optimizer = make([p], **options)
    rng = np.random.default_rng(0)
    for damping in schedule:
        optimizer.param_groups[0]["damping"] = oracle.damping = damping
        for _ in range(6):
            g = 0.3 * rng.normal(size=5)
            p.grad = torch.tensor(g)
            optimizer.step()
            np.testing.assert_allclose(p.detach().numpy(), oracle.step(g), rtol=LOOSE)
    assert ("block0.factor" in optimizer.state[p]) == (
        method == "RFFullAdagrad" and schedule[-1] > 0
    )
