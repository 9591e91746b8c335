"""Directions and factors by kernels against inverse_free.direction, which follows the rules."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.devices import DEVICE, EPS, close, normal, unaligned
from rootfree.curvature import OuterProducts
from rootfree.kernels import axis_products, factors
from rootfree.kernels.halves import halves_of, joined, pack_
from rootfree.layout.tiles import Tile
from rootfree.methods.inverse_free import direction, factor_state
from rootfree.rules import LEAST_DAMPING
from rootfree.structures import make_structure

BF16, FP32 = torch.bfloat16, torch.float32
BLOCKS = 2


def options(**changes):
    return {
        "batch_size": 8,
        "precond_lr": 0.3,
        "damping": 0.01,
        "gamma": 1.0,
        "factor_norm": "spectral",
        "factor_dtype": None,
        "matmul_dtype": BF16,
        "init_scale": "gradient",
        "riemannian_momentum": 0.0,
        "rate_by_rank": False,
        **changes,
    }


def problem(shape, group):
    kind = "diagonal" if len(shape) == 1 else "dense"
    structures = tuple(make_structure(kind, d) for d in shape)
    n = len(shape)
    view, counts = (BLOCKS * shape[0], *shape[1:]), (BLOCKS, *[1] * (n - 1))
    tile = Tile(view, (0,) * n, counts, shape)
    p = torch.empty(1, device=DEVICE)
    return structures, factor_state(p, tile, structures, group, salt=1)


def for_kernels(state, shape):
    """A copy in the form that the kernels want: matrices in halves."""
    copy = {name: t.clone() for name, t in state.items()}
    if len(shape) > 1:
        for name, both in pack_([copy]).items():
            copy |= halves_of(name, both)
    return copy


def by_kernels(group, state, G, squares=None, *, refresh=True, H=None) -> None:
    """G <- U.  Changes state."""
    rates = (group[name] for name in ("batch_size", "precond_lr", "damping", "gamma"))
    B, beta2, lam, gamma = rates
    table = [float("nan")] * 5 + [B, beta2, max(lam, LEAST_DAMPING), gamma, math.nan, math.nan, 0.0]
    numbers = torch.tensor(table, dtype=FP32, device=DEVICE)
    if squares is None:
        squares = G.double().flatten(1).square()
    by_rank = group["rate_by_rank"]
    words = {"norm": group["factor_norm"], "refresh": refresh, "by_rank": by_rank}
    factors.direction_(state, G, squares, numbers, H=H, **words)


def by_rule(group, structures, state, G, *, refresh=True):
    """U.  Changes state."""
    H = OuterProducts(G, weight=group["batch_size"]) if refresh else None
    return direction(group, structures, state, G, H)


def gradients(shape, seed, *, scale=1.0, zero=None):
    G = scale * normal(BLOCKS, *shape, seed=seed)
    if zero is not None:
        G[zero] = 0.0
    return G.to(FP32 if len(shape) == 1 else BF16)


def steps_of(shape, group, count=3, *, twisted=False, **kind):
    """Per step: state and direction by kernels and by the rule, from the same state.

    Factors that start at the identity stay nearly symmetric; `twisted` ones are not.
    """
    structures, state = problem(shape, group)
    if twisted:
        state["started"].fill_(True)
        for n in range(len(shape)):
            K = state[f"factor{n}"]
            K += 0.3 * normal(*K.shape, seed=30 + n).to(K.dtype)
    for i in range(count):
        refresh = i != 1
        G = gradients(shape, i, **kind)
        mine = for_kernels(state, shape)
        U = G.clone()
        by_kernels(group, mine, U, refresh=refresh)
        before = {name: t.clone() for name, t in state.items()}
        expected = by_rule(group, structures, state, G, refresh=refresh)
        yield refresh, before, joined(mine), U, state, expected


def assert_alike(refresh, before, mine, U, state, expected, *, loose=1.0):
    """Directions within a few roundings of bf16; factors within as many of their movement."""
    error = (U.double() - expected.double()).flatten(1).norm(dim=1)
    assert (error <= loose * 6 * EPS * expected.double().flatten(1).norm(dim=1)).all()
    assert mine.keys() == state.keys()
    for name, t in state.items():
        if not name.startswith("factor"):
            assert torch.equal(mine[name], t), name
            continue
        got, want, old = (x.double().flatten(1) for x in (mine[name], t, before[name]))
        if not refresh:
            assert torch.equal(got, want)
            continue
        size = (want - old).norm(dim=1)
        spacing = EPS * want.norm(dim=1) if t.dtype == BF16 else 1e-6 * want.norm(dim=1)
        assert ((got - want).norm(dim=1) <= loose * 3 * EPS * size + 2 * spacing).all(), name


SHAPES = [(12, 20), (20, 3), (70, 2), (5, 9, 4), (6, 5, 9), (7,), (1030,)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "norm"),
    [
        *[(shape, "spectral") for shape in SHAPES],
        *[(shape, norm) for shape in ((6, 20), (5, 4, 9), (7,)) for norm in ("frobenius", None)],
    ],
    ids=str,
)
def test_equals_the_rule(shape, norm):
    group = options(factor_norm=norm)
    for step in steps_of(shape, group):
        assert_alike(*step)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(6, 8), (40, 6), (3, 5, 4), (20, 2, 3), (7,)], ids=str)
def test_factors_without_symmetry(shape):
    for step in steps_of(shape, options(damping=0.5), count=2, twisted=True):
        assert_alike(*step)


WITH_BF16 = {"init_scale": 0.5, "factor_dtype": BF16}
WHOLE = {"gamma": 0, "precond_lr": 1, "damping": 1}  # whole numbers, set by hand


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((6, 8), {"factor_dtype": BF16}),
        ((6, 8), {"init_scale": 0.5}),
        ((6, 8), {"damping": 0.0}),
        ((6, 8), {"damping": 1.0, "gamma": 0.5}),
        ((6, 8), WHOLE),
        ((12, 3), {"rate_by_rank": True}),
        ((2, 3, 20), {"rate_by_rank": True}),
        ((3, 5, 4), WITH_BF16),
        ((3, 5, 4), {"damping": 1.0}),
        ((7,), WITH_BF16),
        ((7,), {"damping": 0.0}),
        ((7,), WHOLE),
    ],
    ids=str,
)
def test_equals_the_rule_with_options(shape, changes):
    for step in steps_of(shape, options(**changes)):
        assert_alike(*step)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(6, 8), (3, 5, 4), (7,)], ids=str)
def test_a_block_without_gradient_does_not_start(shape):
    group = options()
    _, before = problem(shape, group)
    state = for_kernels(before, shape)
    G = gradients(shape, 0, zero=1)
    by_kernels(group, state, G)
    assert state["started"].tolist() == [True, False]
    assert not G[1].any()
    state = joined(state)
    for n in range(len(shape)):
        assert torch.equal(state[f"factor{n}"][1], before[f"factor{n}"][1])
        assert not torch.equal(state[f"factor{n}"][0], before[f"factor{n}"][0])
    for step in steps_of(shape, group, zero=1):
        assert_alike(*step)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(6, 8), (3, 5, 4), (7,)], ids=str)
def test_a_zero_gradient_later_lets_the_factors_grow(shape):
    """Without gradient h = ½(damping - γI), as in the rule."""
    group = options(init_scale=1.0)
    for step in steps_of(shape, group, zero=1):
        assert_alike(*step)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-20, 9e2, 9e5, 1e18])
@pytest.mark.parametrize(("shape", "damping"), [((4, 70), 0.0), ((3, 5, 4), 1e-4)], ids=str)
def test_gradients_of_any_size(shape, scale, damping):
    """From identity, so that Ĝ is as large as they; curvature is limited as in the rule."""
    group = options(init_scale=1.0, damping=damping)
    for step in steps_of(shape, group, count=1, scale=scale):
        assert all(t.isfinite().all() for t in (step[3], *step[2].values()))
        assert_alike(*step, loose=2.0)


def test_the_largest_gradients_that_are_not_scaled_down():
    group = options(init_scale=1.0, damping=0.0)
    for size in (9e2, 9e5):
        structures, other = problem((4, 70), group)
        state = for_kernels(other, (4, 70))
        G = torch.full((BLOCKS, 4, 70), size, device=DEVICE).to(BF16)
        by_rule(group, structures, other, G.clone())
        by_kernels(group, state, G)
        state = joined(state)
        for name in ("factor0", "factor1"):
            moved = (other[name] - torch.eye(other[name].shape[1], device=DEVICE)).norm()
            assert (state[name] - other[name]).norm() < 3 * EPS * moved


def test_the_curvature_of_a_large_block_is_limited_before_it_is_averaged():
    """Otherwise squares of h would leave the range of fp32, and the factor would not move."""
    group = options(init_scale=1.0)
    structures, other = problem((160, 160), group)
    state = for_kernels(other, (160, 160))
    G = torch.full((BLOCKS, 160, 160), 1.9e25, device=DEVICE).to(BF16)
    by_rule(group, structures, other, G.clone())
    by_kernels(group, state, G)
    state = joined(state)
    moved = (other["factor0"] - torch.eye(160, device=DEVICE)).norm()
    assert (state["factor0"] - other["factor0"]).norm() < 3 * EPS * moved


def same(left, right):
    """Bit for bit in the interpreter; on a GPU the library chooses products by size and address."""
    if DEVICE == "cpu" or not left.is_floating_point():
        assert torch.equal(left, right)
    else:
        close(left, right, rtol=3 * EPS, atol=EPS)


def test_in_portions(monkeypatch):
    """Blocks are worked on in portions; slices of state need not be aligned."""
    group = options(factor_dtype=BF16)
    whole, state = [], []
    for portion in (2**26, 1):
        monkeypatch.setattr(axis_products, "PORTION", portion)
        for step in steps_of((5, 7), group, count=1):
            whole.append(step[3])
            state.append(step[2])
    same(whole[0], whole[1])
    for name in state[0]:
        same(state[0][name], state[1][name])


def test_memory_that_starts_anywhere():
    group = options()
    _, state = problem((6, 5, 9), group)
    other = for_kernels(state, (6, 5, 9))
    G = gradients((6, 5, 9), 0)
    H = unaligned(G)
    state = {name: unaligned(t) for name, t in other.items()}
    squares = G.double().flatten(1).square()
    by_kernels(group, other, G, squares)
    by_kernels(group, state, H, unaligned(squares))
    same(G, H)
    for name in state:
        same(state[name], other[name])


def test_nothing_is_read_from_the_host():
    """β₂ and the others are what the table says when the kernels run: recorded ones follow it."""
    group, shape = options(init_scale=1.0), (6, 8)
    results = []
    for beta2 in (0.1, 0.3):
        _, state = problem(shape, group)
        state = for_kernels(state, shape)
        by_kernels({**group, "precond_lr": beta2}, state, gradients(shape, 0))
        results.append(joined(state)["factor0"] - torch.eye(6, device=DEVICE))
    assert (results[1] - 3 * results[0]).norm() < 1e-3 * results[1].norm()
