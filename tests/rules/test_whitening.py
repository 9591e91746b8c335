"""Inverse-free whitening: against its oracle, the method it follows, and what it must survive."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rootfree
from oracles.if_whitening import IFWhiteningOracle, KLShampooOracle
from rules.matrix_runs import AGREES

RATES = [0.02 / 2**k for k in range(5)]
BF16 = {"factor_dtype": torch.bfloat16, "matmul_dtype": torch.bfloat16}


def gradients(shape, steps, *, seed=0, scale=1.0):
    generator = np.random.default_rng(seed)
    return [np.asarray(scale * generator.standard_normal(shape)) for _ in range(steps)]


def trained(shape, grads, *, dtype=torch.float64, **options):
    """The parameter and its state after a step with each of the gradients."""
    p = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = rootfree.IFWhitening([p], block_size=None, **options)
    for g in grads:
        p.grad = torch.as_tensor(g, dtype=dtype)
        optimizer.step()
    return p.detach(), optimizer.state[p]


def whitening_of(state) -> list[torch.Tensor]:
    """Pₙ = CₙCₙᵀ of a parameter that is one block with dense factors."""
    Cs = [state[f"block0.factor{n}"][0].double() for n in range(3) if f"block0.factor{n}" in state]
    return [C @ C.mT for C in Cs]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (1, 6), (2, 3, 2)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precond_lr": 1.0},
        {"precond_lr": 0.4, "update_every": 3},
        {"nesterov": False, "damping": 0.3},
        {"update_rms": None, "momentum": 0.0, "weight_decay": 0.3, "max_update_rms": None},
        {"factor_norm": None, "precond_lr": 0.01},
        {"fast_start": False},
    ],
    ids=str,
)
def test_equals_the_oracle(shape, changes):
    words = {"lr": 0.1, "precond_lr": 0.5, "weight_decay": 0.0, "factor_norm": "frobenius"}
    words |= {"update_every": 1, **changes}
    oracle = IFWhiteningOracle(np.ones(shape), **words)
    grads = gradients(shape, 25, scale=0.01)
    grads[3][...] = 0.0  # nothing to learn from
    grads[7] = grads[7] * (1 if words["factor_norm"] is None else 5)
    p, _ = trained(shape, grads, structure="dense", **words)
    for g in grads:
        oracle.step(g)
    assert np.abs(p.numpy() - oracle.param).max() < AGREES * np.abs(oracle.param).max()


def test_equals_the_oracle_beyond_the_start():
    """β₂ = 0.3 has no faster start from step 117 on; the limit is whole at step 200."""
    words = {"lr": 0.01, "precond_lr": 0.3, "factor_norm": "frobenius", "weight_decay": 0.0}
    oracle = IFWhiteningOracle(np.ones((3, 4)), **words)
    # Steps become small beside what they were, so that the limit decides about their size.
    grads = [g * 0.98**t for t, g in enumerate(gradients((3, 4), 230))]
    p, _ = trained((3, 4), grads, update_every=1, **words)
    for t, g in enumerate(grads):
        assert (oracle.beta2 == 0.3) == (t >= 117)
        oracle.step(g)
    assert np.abs(p.numpy() - oracle.param).max() < 10 * AGREES * np.abs(oracle.param).max()


@pytest.mark.parametrize("structure", ["diagonal", "block_diagonal:2", ("diagonal", "dense")])
def test_structures_are_projections(structure):
    names = structure if isinstance(structure, tuple) else (structure,) * 2
    d = {"diagonal": np.eye(4), "dense": np.ones((4, 4))}
    d["block_diagonal:2"] = np.kron(np.eye(2), np.ones((2, 2)))
    words = {"lr": 0.1, "precond_lr": 0.5, "weight_decay": 0.0, "factor_norm": "frobenius"}
    words |= {"update_every": 1}
    oracle = IFWhiteningOracle(np.ones((4, 4)), **words, masks=[d[name] for name in names])
    grads = gradients((4, 4), 10)
    p, _ = trained((4, 4), grads, structure=structure, **words)
    for g in grads:
        oracle.step(g)
    assert np.abs(p.numpy() - oracle.param).max() < AGREES * np.abs(oracle.param).max()


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 2)], ids=str)
def test_follows_exact_shampoo_to_first_order(shape):
    """A weight of 2β₂ for the new gradient; the difference after five steps shrinks like β₂²."""
    grads = gradients(shape, 6, seed=3)
    lam, errors = 0.1, []
    for beta2 in RATES:
        words = {"lr": 0.0, "precond_lr": beta2, "factor_norm": None, "update_every": 1}
        start = np.mean(grads[0] ** 2) ** (-1 / (2 * len(shape)))
        exact = KLShampooOracle([start * np.eye(d) for d in shape])
        v = np.mean(grads[0] ** 2)
        for i, g in enumerate(grads):
            v += beta2 / 100 * (np.mean(g**2) - v) if i else 0.0
            exact.refresh(g, weight=2 * beta2, lam=lam * v)
        _, state = trained(shape, grads, structure="dense", damping=lam, **words)
        pairs = zip(whitening_of(state), exact.whitening, strict=True)
        # Of the product alone: a scale may go from one factor to the other.
        errors.append(kron_difference(list(pairs)))
    slope = np.polyfit(np.log(RATES), np.log(errors), 1)[0]
    assert 1.8 < slope < 2.2


def kron_difference(pairs) -> float:
    left, right = np.eye(1), np.eye(1)
    for P, Q in pairs:
        left, right = np.kron(left, P.numpy()), np.kron(right, Q)
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


class Constant:
    """A curvature that is the same at every step."""

    def __init__(self, H: np.ndarray, shape: tuple[int, ...]) -> None:
        values, vectors = np.linalg.eigh(H)
        V = (vectors * values**0.5).T.reshape(-1, *shape)
        self.H = rootfree.SumOfOuterProducts(torch.tensor(V))

    def joint(self):
        return ()

    def check(self, params):
        pass

    def of(self, p, *, batch_size):
        return self.H

    def used(self):
        pass


def test_whitens_what_it_converged_to():
    """P H P = I at the fixed point."""
    generator = np.random.default_rng(0)
    L, R = np.diag([1.0, 3.0, 10.0]), generator.standard_normal((4, 4)) + 2 * np.eye(4)
    H = np.kron(L @ L.T, R.T @ R)
    words = {"precond_lr": 0.3, "damping": 0.0, "update_every": 1, "lr": 0.0}
    grads = gradients((3, 4), 300)
    _, state = trained((3, 4), grads, curvature=Constant(H, (3, 4)), **words)
    P = np.kron(*[P.numpy() for P in whitening_of(state)])
    assert np.abs(P @ H @ P - np.eye(12)).max() < 1e-6


@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
@settings(max_examples=25, deadline=None)
@given(
    beta2=st.floats(0.01, 1.0),
    sizes=st.lists(st.floats(-12, 12), min_size=3, max_size=12),
    rank=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_stays_positive_definite(options, beta2, sizes, rank, seed):
    """Any gradients, any β₂ <= 1: low rank, sizes that jump over 24 orders of magnitude."""
    generator = np.random.default_rng(seed)
    grads = [
        10**size * generator.standard_normal((6, rank)) @ generator.standard_normal((rank, 5))
        for size in sizes
    ]
    p, state = trained(
        (6, 5), grads, dtype=torch.float32, precond_lr=beta2, update_every=1, **options
    )
    assert p.isfinite().all()
    for P in whitening_of(state):
        assert P.isfinite().all()
        assert torch.linalg.eigvalsh(P).min() > 0


@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
def test_dead_features_zero_loss_and_gradients_that_come_back(options):
    """Rows that never get a gradient, thousands of steps with hardly any, then large ones."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(8, 8, generator=generator)
    p = nn.Parameter(torch.zeros(8, 6))
    optimizer = rootfree.IFWhitening([p], update_every=1, **options)
    sizes = [1.0] * 300 + [1e-12] * 1500 + [0.0] * 1500 + [1e3] * 200
    for size in sizes:
        g = size * A @ torch.randn(8, 6, generator=generator)
        g[:3] = 0.0
        p.grad = g
        optimizer.step()
        assert p.isfinite().all()
    state = optimizer.state[p]
    for P in whitening_of(state):
        assert P.isfinite().all()
        assert torch.linalg.eigvalsh(P).min() > 0
    # What comes back is whitened again: the covariance of U is about that of noise.
    L, R = whitening_of(state)
    us = torch.stack([L[3:, 3:] @ A[3:].double() * 1e3 @ torch.randn(8, 6, dtype=torch.float64) @ R
                      for _ in range(400)])  # fmt: skip
    values = torch.linalg.eigvalsh(torch.einsum("kij,klj->il", us, us) / (400 * 6))
    assert values.min() > 0.2
    assert values.max() < 3


def test_without_damping_a_dead_feature_is_bounded_all_the_same():
    grads = gradients((4, 3), 4000)
    for g in grads:
        g[0] = 0.0
    _, state = trained((4, 3), grads, dtype=torch.float32, damping=0.0, update_every=1)
    assert all(P.isfinite().all() for P in whitening_of(state))


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_the_scale_of_the_loss_does_not_matter(scale):
    grads = gradients((4, 3), 30)
    p, _ = trained((4, 3), grads)
    q, _ = trained((4, 3), [scale * g for g in grads])
    assert (p - q).abs().max() < 1e-9


def test_orthogonal_transformations_do_not_matter():
    generator = np.random.default_rng(1)
    left, right = (np.linalg.qr(generator.standard_normal((d, d)))[0] for d in (4, 3))
    grads = gradients((4, 3), 30)
    words = {"damping": 0.01, "weight_decay": 0.0, "update_every": 1}
    p, _ = trained((4, 3), grads, **words)
    q, _ = trained((4, 3), [left @ g @ right.T for g in grads], **words)
    moved = left @ (p - 1).numpy() @ right.T
    assert np.abs(moved - (q - 1).numpy()).max() < 1e-9


@pytest.mark.parametrize("structure", ["lower_triangular", "hierarchical:2", "upper_toeplitz"])
def test_refuses_structures_that_are_not_symmetric(structure):
    with pytest.raises(ValueError, match="structure must be .* got '" + structure):
        rootfree.IFWhitening([nn.Parameter(torch.ones(2, 2))], structure=structure)


def test_a_parameter_without_gradients_does_not_keep_the_others_from_being_remembered():
    """Its clock stands still; what is updated together stays the same."""
    ps = [nn.Parameter(torch.ones(3, 2)) for _ in range(3)]
    optimizer = rootfree.IFWhitening(ps, update_every=1)
    found = []
    for _ in range(4):
        for p in ps[:2]:
            p.grad = torch.ones(3, 2)
        optimizer.step()
        found.append(optimizer._memories[id(optimizer.param_groups[0])].patterns[0][1])
    assert found[1] is found[2]
    assert found[2] is found[3]
    assert len(found[3]) == 1
    ps[2].grad = torch.ones(3, 2)  # it has a start of its own
    optimizer.step()
    assert len(optimizer._memories[id(optimizer.param_groups[0])].patterns[0][1]) == 2


def test_diagnostics_tell_the_size_of_a_step_of_the_start():
    """Steps that are scaled up less than later ones would be: the limit is that of the step."""
    p = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    optimizer = rootfree.IFWhitening([p], weight_decay=0.0)
    for t, g in enumerate(gradients((4, 3), 30)):
        p.grad, before = torch.as_tensor(g * 0.5**t), p.detach().clone()
        optimizer.step()
        (found,) = optimizer.diagnostics().read()
        moved = (p.detach() - before).norm() / p.detach().norm()
        assert found.update_ratio == pytest.approx(moved.item(), rel=1e-9)
