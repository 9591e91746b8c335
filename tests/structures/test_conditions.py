"""Inverses inside a structure, and condition estimates against exact ones in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rootfree.structures import Dense, Diagonal, make_structure
from rootfree.structures.conditions import condition, norm_from_below, unit_diagonal

from .cases import CASES, NAMES, Case
from .patterns import oracle


def exact(dense: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cond(dense)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_inverse_is_in_the_structure(case: Case):
    inverse = case.structure.inverse(case.K)
    wide = torch.promote_types(case.dtype, torch.float32)
    assert inverse.dtype == wide
    assert inverse.shape == case.K.shape
    product = case.structure.unpack(inverse).double() @ case.K_dense
    eye = torch.eye(case.d, dtype=torch.float64)
    bound = 4 * case.d * torch.finfo(wide).eps * float(exact(case.K_dense).max())
    torch.testing.assert_close(product, eye.expand_as(product), rtol=0, atol=bound)


@pytest.mark.parametrize("decades", [0, 2, 4])
@pytest.mark.parametrize("d", [5, 64])
@pytest.mark.parametrize("name", NAMES)
def test_estimates_are_below_and_near(name, d, decades):
    """Between 0.7 and 1 of the exact condition number, over many orders of magnitude."""
    structure, draw = make_structure(name, d), torch.Generator().manual_seed(d + decades)
    noise = oracle(name, d).random(3, draw)
    dense = torch.eye(d, dtype=torch.float64) + 10**decades * noise / noise.abs().sum(-1).amax()
    found = condition(structure, structure.pack(dense))
    ratio = found / exact(dense)
    assert bool(((ratio > 0.7) & (ratio < 1 + 1e-9)).all()), ratio


@settings(max_examples=30, deadline=None)
@given(d=st.integers(2, 40), seed=st.integers(0, 10**6), decades=st.floats(0, 6))
def test_any_spectrum(d, seed, decades):
    draw = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=draw))[0] for _ in range(2)
    )
    spectrum = 10 ** (decades * torch.rand(d, dtype=torch.float64, generator=draw))
    K = (left * spectrum @ right).unsqueeze(0)
    found = condition(Dense(d), K) / (spectrum.max() / spectrum.min())
    assert 0.6 < float(found) < 1 + 1e-6
    assert 0.75 < float(norm_from_below(Dense(d), K) / spectrum.max()) < 1 + 1e-12


def test_whatever_the_size_of_the_numbers():
    K = torch.tensor([[[2.0, 1.0], [0.0, 1.0]]])
    usual = condition(Dense(2), K)
    for size in (1e-30, 1e30):
        torch.testing.assert_close(condition(Dense(2), size * K), usual)


def test_singular_and_broken_factors_are_told_apart():
    K = torch.eye(3).repeat(3, 1, 1)
    K[1, 2, 2], K[2, 0, 1] = 0.0, torch.nan
    assert str(condition(Dense(3), K).tolist()) == "[1.0, inf, nan]"
    assert condition(Diagonal(2), torch.tensor([[0.0, 1.0], [-4.0, 2.0]])).tolist() == [
        torch.inf,
        2.0,
    ]


def test_portions_change_nothing(monkeypatch):
    K = torch.randn(5, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    usual = condition(Dense(8), K)
    monkeypatch.setattr("rootfree.structures.conditions._AT_ONCE", 2 * 64)
    torch.testing.assert_close(condition(Dense(8), K), usual)


def test_a_diagonal_scaling_counts_for_nothing():
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(1, 6, 9, dtype=torch.float64, generator=draw)
    S, scale = X @ X.mT, 10.0 ** torch.arange(6, dtype=torch.float64)
    scaled = scale[:, None] * S * scale
    torch.testing.assert_close(unit_diagonal(scaled), unit_diagonal(S))
