"""Shampoo and full-matrix AdaGrad with the root against NumPy float64, and degenerate cases."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch

from rootfree_lab.baselines import FullAdagrad, Shampoo

SHAPES = ((4,), (3, 4), (2, 3, 4), (1, 3, 1, 2))


def inverse_root(S: np.ndarray, order: int, damping: float) -> np.ndarray:
    """(S + λI)^{-1/order} by the singular values, written differently from the code."""
    U, s, _ = np.linalg.svd(S + damping * np.eye(len(S)), hermitian=True)
    return U @ np.diag(s ** (-1.0 / order)) @ U.T


class Oracle:
    """One parameter: explicit matricisations, explicit Kronecker product on vec(G)."""

    def __init__(self, p, *, lr, beta2, alpha1, lam, kappa, gamma, T, corrected, flat):
        self.p, self.flat = p.copy(), flat
        self.lr, self.beta2, self.alpha1, self.lam = lr, beta2, alpha1, lam
        self.kappa, self.gamma, self.T, self.corrected = kappa, gamma, T, corrected
        self.m = np.zeros_like(p)
        self.S, self.t, self.refreshes = None, 0, 0

    def step(self, g: np.ndarray) -> np.ndarray:
        G = g.reshape(-1) if self.flat else g.squeeze()
        if self.S is None:
            self.S = [np.zeros((d, d)) for d in G.shape]
        N = G.ndim
        if self.t % self.T == 0:
            self.refreshes += 1
            for n in range(N):
                rows = np.moveaxis(G, n, 0).reshape(G.shape[n], -1)
                outer = sum(np.outer(c, c) for c in rows.T)
                self.S[n] = (1 - self.beta2 * self.gamma) * self.S[n] + self.beta2 * outer
            bias = 1.0
            if self.corrected and self.gamma > 0:
                bias = 1 - (1 - self.beta2 * self.gamma) ** self.refreshes
            self.P = np.eye(1)
            for S in self.S:
                self.P = np.kron(self.P, inverse_root(S / bias, 2 * N, self.lam))
        self.t += 1
        U = (self.P @ G.reshape(-1)).reshape(g.shape)
        self.m = self.alpha1 * self.m + U + self.kappa * self.p
        self.p = self.p - self.lr * self.m
        return self.p


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("method", "gamma"), [(Shampoo, 1.0), (Shampoo, 0.0), (FullAdagrad, 0.0),
                                               (FullAdagrad, 1.0)])  # fmt: skip
def test_oracle(method, gamma, corrected, shape):
    rng = np.random.default_rng(0)
    start = rng.standard_normal(shape)
    p = torch.nn.Parameter(torch.tensor(start))
    optimizer = method([p], lr=0.1, precond_lr=0.3, momentum=0.7, damping=1e-2, weight_decay=0.05,
                       gamma=gamma, update_every=2, block_size=None, bias_correction=corrected,
                       max_update_rms=None, hold_stale=False, root_dtype="float64")  # fmt: skip
    oracle = Oracle(start, lr=0.1, beta2=0.3, alpha1=0.7, lam=1e-2, kappa=0.05, gamma=gamma, T=2,
                    corrected=corrected, flat=method is FullAdagrad)  # fmt: skip
    for _ in range(5):
        g = rng.standard_normal(shape)
        p.grad = torch.tensor(g)
        optimizer.step()
        np.testing.assert_allclose(p.detach().numpy(), oracle.step(g), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("gamma", "reference"), [(0.0, "Adagrad"), (1.0, "RMSprop")])
@pytest.mark.parametrize("method", [Shampoo, FullAdagrad])
def test_gradients_along_single_axes_give_the_diagonal_method(method, gamma, reference):
    """With one-hot gradients Ŝ is diagonal, so its root is the diagonal methods' root."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    q = torch.nn.Parameter(p.detach().clone())
    mine = method([p], lr=0.1, precond_lr=0.3 if gamma else 1.0, momentum=0.0, damping=0.0,
                  gamma=gamma, update_every=1, bias_correction=False, root_dtype="float64",
                  max_update_rms=None)  # fmt: skip
    if reference == "Adagrad":
        theirs = torch.optim.Adagrad([q], lr=0.1, eps=1e-30)
    else:
        theirs = torch.optim.RMSprop([q], lr=0.1, alpha=0.7, eps=1e-30)
    for i in (0, 1, 0, 3, 4, 1, 0):
        g = torch.zeros(5, dtype=torch.float64)
        g[i] = torch.randn((), dtype=torch.float64)
        p.grad, q.grad = g.clone(), g.clone()
        mine.step()
        theirs.step()
        torch.testing.assert_close(p, q)


def test_scalar_parameter_is_rmsprop():
    p = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer = Shampoo([p], lr=0.1, momentum=0.0, precond_lr=0.5, damping=0.0, update_every=1,
                        bias_correction=False, max_update_rms=None)  # fmt: skip
    p.grad = torch.tensor(3.0, dtype=torch.float64)
    optimizer.step()
    assert p.item() == pytest.approx(2 - 0.1 * 3 / np.sqrt(0.5 * 9), rel=1e-6)


def test_blocks_are_parameters_of_their_own():
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(5, 4))
    parts = [
        torch.nn.Parameter(whole.detach()[rows].clone()) for rows in (slice(0, 2), slice(2, 5))
    ]
    options = {"block_size": 4, "max_update_rms": None, "hold_stale": False, "damping": 1e-3}
    one, two = Shampoo([whole], **options), Shampoo(parts, **options)
    for _ in range(3):
        whole.grad = torch.randn(5, 4)
        parts[0].grad, parts[1].grad = whole.grad[:2].clone(), whole.grad[2:].clone()
        one.step()
        two.step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in parts]))


def test_input_axes_are_merged():
    p = torch.nn.Parameter(torch.randn(8, 4, 3, 3))
    shapes = {k: t.shape[0] for k, t in Shampoo([p]).state[p].items() if k.startswith("factor")}
    assert shapes == {"factor0.0": 8, "factor0.1": 36}
    shapes = {k for k in Shampoo([p], block_size=None).state[p] if k.startswith("factor")}
    assert len(shapes) == 4


def test_the_cap_bounds_stale_directions():
    p = torch.nn.Parameter(torch.zeros(4))
    capped = Shampoo([p], lr=1.0, momentum=0.0, damping=1e-12, update_every=2, max_update_rms=1.0,
                     hold_stale=False)  # fmt: skip
    for i in (0, 1):  # the second gradient has no part in the factor: scaled by 10^6 without a cap
        p.grad = torch.eye(4)[i]
        before = p.detach().clone()
        capped.step()
        assert (p.detach() - before).square().mean().sqrt() <= 1 + 1e-5


def lengths(gradients, **options):
    """RMS of each step."""
    p = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = Shampoo([p], lr=1.0, momentum=0.0, update_every=2, max_update_rms=None, **options)
    found = []
    for g in gradients:
        before = p.detach().clone()
        p.grad = g
        optimizer.step()
        found.append((p.detach() - before).square().mean().sqrt().item())
    return found


def test_a_step_between_refreshes_is_no_longer_than_the_refreshed_one():
    torch.manual_seed(0)
    gradients = list(torch.randn(6, 4, 1) @ torch.randn(6, 1, 5))  # of rank one, each another
    held, free = lengths(gradients), lengths(gradients, hold_stale=False)
    for refreshed, stale in ((0, 1), (2, 3), (4, 5)):
        assert held[stale] <= held[refreshed] * (1 + 1e-5)
    assert free[1] > 100 * free[0]
    # What needs no holding is not held.
    small = [gradients[0], 0.1 * gradients[0]]
    assert lengths(small) == lengths(small, hold_stale=False)


def test_zero_gradients_move_nothing_and_harm_nothing():
    zero, one = torch.zeros(3, 3), torch.eye(3)
    assert lengths([zero, zero, one, zero]) == pytest.approx(
        [0, 0, lengths([zero, zero, one])[2], 0]
    )


@pytest.mark.parametrize("method", [Shampoo, FullAdagrad])
def test_checkpoint_continues_the_run(method):
    torch.manual_seed(0)
    gradients = torch.randn(6, 3, 4)
    p = torch.nn.Parameter(torch.randn(3, 4))
    optimizer = method([p])
    for g in gradients[:3]:
        p.grad = g.clone()
        optimizer.step()
    q = torch.nn.Parameter(p.detach().clone())
    other = method([q])
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    for g in gradients[3:]:
        p.grad, q.grad = g.clone(), g.clone()
        optimizer.step()
        other.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr must be in \[0, inf\)"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1.0\)"),
        ({"precond_lr": 1.5}, "at most 1"),
        ({"update_every": 0}, "update_every must be a positive integer"),
        ({"block_size": 0}, "block_size must be"),
        ({"max_update_rms": 0.0}, "max_update_rms must be"),
        ({"root_dtype": "float16"}, "root_dtype must be"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Shampoo([torch.nn.Parameter(torch.zeros(2))], **options)
