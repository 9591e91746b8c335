"""The chunked scan against the recurrence written as a loop."""

from __future__ import annotations

import pytest
import torch

from rootfree_lab.models.selective_scan import selective_scan
from rootfree_lab.models.vmamba import cross_merge, cross_scan


def slow_scan(u, delta, A, B, C, D):
    b, g, d, length = u.shape
    y = torch.empty_like(u)
    for i in range(b):
        for k in range(g):
            for c in range(d):
                h = torch.zeros(A.shape[-1], dtype=u.dtype)
                for t in range(length):
                    step = delta[i, k, c, t]
                    h = torch.exp(step * A[k, c]) * h + step * B[i, k, :, t] * u[i, k, c, t]
                    y[i, k, c, t] = h @ C[i, k, :, t] + D[k, c] * u[i, k, c, t]
    return y


def problem(length: int):
    torch.manual_seed(0)
    b, g, d, n = 2, 4, 3, 5
    tensors = (
        torch.randn(b, g, d, length),
        torch.rand(b, g, d, length),
        -torch.rand(g, d, n) * 4,
        torch.randn(b, g, n, length),
        torch.randn(b, g, n, length),
        torch.randn(g, d),
    )
    return [t.double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_equals_the_loop(length, chunk):
    inputs = problem(length)
    with torch.no_grad():
        expected = slow_scan(*inputs)
    torch.testing.assert_close(selective_scan(*inputs, chunk=chunk), expected)


@pytest.mark.parametrize("chunk", [4, 5, 64])  # runs that fill a chunk, and that do not
def test_gradients_equal_those_of_the_loop(chunk):
    inputs = problem(6)
    weights = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    fast = torch.autograd.grad((selective_scan(*inputs, chunk=chunk) * weights).sum(), inputs)
    slow = torch.autograd.grad((slow_scan(*inputs) * weights).sum(), inputs)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b)


def test_strong_decay_over_many_positions_stays_finite():
    u = torch.ones(1, 1, 1, 500)
    A, B = torch.full((1, 1, 2), -50.0), torch.ones(1, 1, 2, 500)
    y = selective_scan(u, u, A, B, B, torch.zeros(1, 1))
    # e^-50 forgets all: only the present input is left, n times
    torch.testing.assert_close(y, torch.full_like(u, 2.0))


def test_directions():
    image = torch.arange(6.0).view(1, 1, 2, 3)  # rows 0 1 2 and 3 4 5
    scans = cross_scan(image)[0, :, 0].tolist()
    assert scans == [
        [0, 1, 2, 3, 4, 5],
        [0, 3, 1, 4, 2, 5],
        [5, 4, 3, 2, 1, 0],
        [5, 2, 4, 1, 3, 0],
    ]
    assert torch.equal(cross_merge(cross_scan(image), 2, 3), 4 * image)
