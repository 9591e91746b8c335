"""Whitening by kernels against the rule of the method."""

from __future__ import annotations

import pytest
import torch

from kernels.devices import DEVICE, normal
from kernels.test_direction import BF16, BLOCKS, FP32, assert_alike, for_kernels, gradients
from rootfree.curvature import OuterProducts
from rootfree.kernels import whitening
from rootfree.kernels.halves import joined
from rootfree.methods.if_whitening import _direction
from rootfree.structures import make_structure


def state_of(shape, *, dtype=FP32):
    kind = "diagonal" if len(shape) == 1 else "dense"
    structures = tuple(make_structure(kind, d) for d in shape)
    state = {
        f"factor{n}": s.identity(BLOCKS, dtype=dtype, device=DEVICE)
        for n, s in enumerate(structures)
    }
    state["mean_square"] = torch.zeros(BLOCKS, device=DEVICE)
    state["started"] = torch.zeros(BLOCKS, dtype=torch.bool, device=DEVICE)
    if dtype == BF16:
        state["rounding"] = torch.tensor([3, -5], dtype=torch.int32, device=DEVICE)
    return structures, state


def steps_of(shape, count=3, *, norm="spectral", dtype=FP32, twisted=False, beta2=0.5, **kind):
    """Per step: state and direction by kernels and by the rule, from the same state."""
    structures, state = state_of(shape, dtype=dtype)
    group = {"precond_lr": beta2, "damping": 0.01, "factor_norm": norm, "update_every": 1}
    numbers = torch.tensor([0.0] * 5 + [1.0, beta2, 0.01, 1.0, *[0.0] * 3], device=DEVICE)
    if twisted:  # factors without symmetry
        state["started"].fill_(True)
        state["mean_square"].fill_(2.0)
        for n in range(len(shape)):
            C = state[f"factor{n}"]
            C += 0.3 * normal(*C.shape, seed=30 + n).to(C.dtype)
    for i in range(count):
        refresh = i != 1
        G = gradients(shape, i, **kind)
        mine, U = for_kernels(state, shape), G.clone()
        squares = G.double().flatten(1).square()
        whitening.direction_(mine, U, squares, numbers, norm=norm, refresh=refresh)
        before = {name: t.clone() for name, t in state.items()}
        expected = _direction(group, structures, state, G, OuterProducts(G) if refresh else None)
        yield refresh, before, joined(mine), U, state, expected


def check(step) -> None:
    """Means in fp32 differ by rounding; the rest as for inverse-free Shampoo."""
    refresh, before, mine, U, state, expected = step
    torch.testing.assert_close(mine["mean_square"], state["mean_square"], rtol=1e-5, atol=0)
    mine = {**mine, "mean_square": state["mean_square"]}
    # P = CCᵀ doubles what rounding of C does to the direction.
    assert_alike(refresh, before, mine, U, state, expected, loose=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(12, 20), (70, 2), (5, 9, 4), (7,), (1030,)], ids=str)
def test_equals_the_rule(shape):
    for step in steps_of(shape):
        check(step)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["frobenius", None])
@pytest.mark.parametrize("shape", [(6, 8), (3, 5, 4), (7,)], ids=str)
def test_equals_the_rule_with_other_norms(shape, norm):
    for step in steps_of(shape, norm=norm, beta2=0.1):
        check(step)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(6, 8), (3, 5, 4), (7,)], ids=str)
def test_factors_without_symmetry_and_stored_in_bf16(shape):
    for step in steps_of(shape, count=2, twisted=True):
        check(step)
    for step in steps_of(shape, dtype=BF16):
        check(step)


def test_a_block_without_gradient_waits():
    for _, _, mine, U, state, _ in steps_of((6, 8), zero=1):
        assert mine["started"].tolist() == [True, False]
        assert torch.equal(mine["factor0"][1], torch.eye(6, device=DEVICE))
        assert not U[1].any()
        assert mine["mean_square"][1] == state["mean_square"][1] == 0


@pytest.mark.parametrize("scale", [1e-12, 1e10])
def test_gradients_that_jump(scale):
    """λ follows sooner than P: it, and the damping, are limited before they leave the range."""
    structures, state = state_of((6, 8))
    group = {"precond_lr": 0.5, "damping": 0.01, "factor_norm": "spectral", "update_every": 1}
    numbers = torch.tensor([0.0] * 5 + [1.0, 0.5, 0.01, 1.0, *[0.0] * 3], device=DEVICE)
    mine = for_kernels(state, (6, 8))
    for i, size in enumerate((1.0, scale, scale, 1.0)):
        G = gradients((6, 8), i, scale=size)
        _direction(group, structures, state, G, OuterProducts(G))
        whitening.direction_(
            mine, G, G.double().flatten(1).square(), numbers, norm="spectral", refresh=True
        )
        assert G.isfinite().all()
        torch.testing.assert_close(mine["mean_square"], state["mean_square"], rtol=1e-4, atol=0)
    for n in range(2):
        C = joined(mine)[f"factor{n}"].double()
        assert torch.linalg.eigvalsh(C @ C.mT).min() > 0
