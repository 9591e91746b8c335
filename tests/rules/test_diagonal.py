"""The diagonal optimizers against their float64 oracles, and proof that the comparison bites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rootfree
from oracles.diagonal import RFAdaGradOracle, RFAdamWOracle, RFRMSPropOracle

STEPS = 100

# A step rounds about ten times, each time by at most half of eps = 2.2e-16 of the largest value
# seen, and nothing amplifies it (the gradients are given, they do not depend on the parameters):
# 100 steps · 10 · 1.1e-16 = 1.1e-13, and a margin of ten.
AGREES = 1e-12


@dataclass(frozen=True)
class Method:
    """An optimizer and its oracle, which are given the same words."""

    optimizer: type[rootfree.RootFreeOptimizer]
    oracle: Callable[..., Any]

    def optimizer_options(self, options: dict[str, Any]) -> dict[str, Any]:
        options = {"max_update": None, "nesterov": False, **options}
        if "fast_start" in self.optimizer.options:
            options = {"fast_start": False, **options}
        if self.optimizer is not rootfree.RFAdamW:
            return options
        betas = (options.pop("momentum"), 1 - options.pop("precond_lr"))
        return {**options, "betas": betas}


METHODS = {
    "RFRMSprop": Method(rootfree.RFRMSprop, RFRMSPropOracle),
    "RFAdagrad": Method(rootfree.RFAdagrad, RFAdaGradOracle),
    "RFAdamW": Method(rootfree.RFAdamW, RFAdamWOracle),
}


@pytest.fixture(params=METHODS)
def method(request) -> Method:
    return METHODS[request.param]


def difference(
    method: Method,
    options: dict[str, Any],
    *,
    shape: tuple[int, ...] = (3, 4),
    scale: float = 1.0,
    seed: int = 0,
    oracle_options: dict[str, Any] | None = None,
) -> float:
    """Largest distance of the two parameter trajectories, over the largest parameter norm."""
    rng = np.random.default_rng(seed)
    start = rng.normal(size=shape)
    oracle = method.oracle(start, **{**options, **(oracle_options or {})})
    p = nn.Parameter(torch.tensor(start))
    assert p.dtype == torch.float64
    optimizer = method.optimizer([p], **method.optimizer_options(options))
    worst, largest = 0.0, float(np.linalg.norm(start))
    for _ in range(STEPS):
        gradient = scale * rng.normal(size=shape)
        p.grad = torch.as_tensor(gradient)  # a zero-axis draw is a plain float
        optimizer.step()
        expected = oracle.step(gradient)
        worst = max(worst, float(np.linalg.norm(p.detach().numpy() - expected)))
        largest = max(largest, float(np.linalg.norm(expected)))
    return worst / largest


hyper_parameters = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.5),
        "batch_size": st.integers(1, 100_000),
        "precond_lr": st.floats(1e-3, 0.999),
        "momentum": st.sampled_from([0.0, 0.5, 0.9, 0.99]),
        "damping": st.sampled_from([0.0, 1e-8, 1e-3, 1.0]),
        "weight_decay": st.sampled_from([0.0, 1e-4, 0.1]),
    }
)


@settings(max_examples=25)
@given(
    options=hyper_parameters,
    shape=st.lists(st.integers(1, 3), max_size=4).map(tuple),
    scale=st.floats(-3, 3).map(lambda exponent: 10**exponent),
    seed=st.integers(0, 2**32 - 1),
)
def check_agreement(method: Method, options, shape, scale, seed) -> None:
    assert difference(method, options, shape=shape, scale=scale, seed=seed) < AGREES


def test_parameters_agree_with_the_oracle_after_100_steps(method):
    check_agreement(method)


# Everything at work: no term of the update vanishes, none drowns another.
BALANCED: dict[str, Any] = {
    "lr": 0.05,
    "batch_size": 100,
    "precond_lr": 0.05,
    "momentum": 0.8,
    "damping": 0.5,
    "weight_decay": 0.1,
}


@pytest.mark.parametrize(
    "without", [{}, {"momentum": 0.0}, {"damping": 0.0}, {"weight_decay": 0.0}], ids=str
)
def test_each_term_can_be_left_out(method, without):
    assert difference(method, {**BALANCED, **without}) < AGREES


TAILS = [
    {"nesterov": True},
    {"nesterov": True, "momentum": 0.0},
    {"decoupled_weight_decay": True},
    {"nesterov": True, "decoupled_weight_decay": True},
]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *[(name, changes) for name in ("RFRMSprop", "RFAdagrad") for changes in TAILS],
        *[("RFAdamW", changes) for changes in TAILS[:2]],  # its decay is always decoupled
    ],
    ids=str,
)
def test_nesterov_and_decoupled_decay(name, changes):
    options = {**BALANCED, **changes}
    assert difference(METHODS[name], options) < AGREES
    for option in ("nesterov", "decoupled_weight_decay"):
        if changes.get(option) and options["momentum"] > 0:
            off = difference(METHODS[name], options, oracle_options={option: False})
            assert off > 1e6 * AGREES


PERTURBED = {
    "B": {"batch_size": 101},
    "start": {"initial": 1.01},
    "damping": {"damping": 0.505},
    "step size": {"lr": 0.0505},
    "preconditioner's step": {"precond_lr": 0.0505},
    "momentum": {"momentum": 0.808},
    "decay": {"weight_decay": 0.101},
}


@pytest.mark.parametrize("perturbation", PERTURBED)
def test_one_per_cent_more_of_anything_is_seen(method, perturbation):
    """The agreement above would fail a million times over if a constant were off by 1 %."""
    # Squares of size one against a start of one and a damping of a half: all three are felt.
    off = difference(method, BALANCED, scale=0.1, oracle_options=PERTURBED[perturbation])
    assert off > 1e6 * AGREES


def test_a_batch_size_that_changes_scales_each_squared_gradient_by_its_own(method):
    rng = np.random.default_rng(0)
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    start = {"fast_start": False} if "fast_start" in method.optimizer.options else {}
    optimizer = method.optimizer([p], lr=0.1, damping=0.0, max_update=None, **start)
    s = np.ones(3)
    is_adam = isinstance(optimizer, rootfree.RFAdamW)
    beta2 = 1 - optimizer.defaults["betas"][1] if is_adam else optimizer.defaults["precond_lr"]
    gamma = 0.0 if isinstance(optimizer, rootfree.RFAdagrad) else 1.0
    for batch in (8, 64, 1, 1000):
        gradient = rng.normal(size=3)
        optimizer.batch_size = batch
        p.grad = torch.tensor(gradient)
        optimizer.step()
        s = (1 - beta2 * gamma) * s + beta2 * batch * gradient**2
    found = optimizer.state[p]["preconditioner"].numpy()
    np.testing.assert_allclose(found, s, rtol=1e-14)


def test_several_parameters_and_groups_each_follow_their_own_oracle(method):
    rng = np.random.default_rng(0)
    starts = [rng.normal(size=shape) for shape in [(3,), (2, 2), ()]]
    ps = [nn.Parameter(torch.tensor(start)) for start in starts]
    words = [BALANCED, BALANCED, {**BALANCED, "lr": 0.2, "batch_size": 7, "damping": 0.01}]
    oracles = [method.oracle(s, **w) for s, w in zip(starts, words, strict=True)]
    overrides = {"lr": 0.2, "batch_size": 7, "damping": 0.01}
    optimizer = method.optimizer(
        [{"params": ps[:2]}, {"params": ps[2:], **overrides}],
        **method.optimizer_options(BALANCED),
    )
    for _ in range(20):
        for p, oracle in zip(ps, oracles, strict=True):
            gradient = np.asarray(rng.normal(size=p.shape))
            p.grad = torch.tensor(gradient)
            oracle.step(gradient)
        optimizer.step()
    for p, oracle in zip(ps, oracles, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), oracle.param, rtol=AGREES, atol=AGREES)


@pytest.mark.parametrize("schedule", [(0.8, 0.0, 0.8), (0.0, 0.8, 0.0)], ids=str)
@pytest.mark.parametrize("name", ["RFRMSprop", "RFAdagrad"])
def test_momentum_is_turned_on_and_off_between_steps(name, schedule):
    """Whatever was there before, momentum that is turned on starts at zero."""
    options = {**BALANCED, "momentum": schedule[0]}
    oracle = METHODS[name].oracle(np.ones(3), **options)
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = METHODS[name].optimizer([p], **METHODS[name].optimizer_options(options))
    rng = np.random.default_rng(0)
    for momentum in schedule:
        optimizer.param_groups[0]["momentum"] = oracle.momentum = momentum
        oracle.buffer = np.zeros(3)  # of no use where it is off
        for _ in range(4):
            gradient = rng.normal(size=3)
            p.grad = torch.tensor(gradient)
            optimizer.step()
            np.testing.assert_allclose(p.detach().numpy(), oracle.step(gradient), rtol=AGREES)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["RFRMSprop", "RFAdamW"])
def test_no_element_of_the_direction_is_above_its_limit(name, nesterov):
    """Against the equations written out, with directions above and below the limit."""
    rng = np.random.default_rng(0)
    c, lr, B, lam, beta2, alpha1 = 0.3, 0.1, 4, 0.05, 0.1, 0.8
    start = rng.normal(size=5)
    words = {"lr": lr, "batch_size": B, "damping": lam, "max_update": c, "fast_start": False}
    p, w, s, m = nn.Parameter(torch.tensor(start)), start.copy(), np.ones(5), np.zeros(5)
    if name == "RFAdamW":
        optimizer = rootfree.RFAdamW([p], betas=(alpha1, 1 - beta2), nesterov=nesterov, **words)
    else:
        words |= {"precond_lr": beta2, "momentum": alpha1, "nesterov": nesterov}
        optimizer = rootfree.RFRMSprop([p], **words)
    limited = 0
    for _ in range(20):
        g = 0.5 * rng.normal(size=5)
        p.grad = torch.tensor(g)
        optimizer.step()
        s = (1 - beta2) * s + beta2 * B * g**2
        if name == "RFAdamW":
            within = (s + lam) * np.clip(g / (s + lam), -c, c)
            m = alpha1 * m + (1 - alpha1) * within
            step = (alpha1 * m + (1 - alpha1) * within if nesterov else m) / (s + lam)
        else:
            u = np.clip(g / (s + lam), -c, c)
            m = alpha1 * m + u
            step = u + alpha1 * m if nesterov else m
        limited += int((np.abs(g / (s + lam)) > c).sum())
        w = w - lr * step
    assert 10 < limited < 90
    np.testing.assert_allclose(p.detach().numpy(), w, rtol=AGREES)
