"""A fingerprint of a machine's float64 arithmetic: machines with the same one give the same bits.

Products, decompositions, transforms, sums and powers are rounded differently by different
processors and libraries. Call `probe` with one thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

#: (b, m, k, n) of products as the recorded cases have them, and a few larger ones
PRODUCTS = (
    (1, 7, 7, 1), (2, 5, 5, 6), (2, 6, 6, 5), (4, 2, 2, 3), (6, 3, 3, 4), (2, 4, 4, 12),
    (2, 12, 12, 4), (1, 24, 24, 24), (2, 9, 9, 11), (2, 11, 11, 9), (2, 30, 30, 30),
    (1, 48, 48, 48), (2, 30, 30, 1), (3, 1, 40, 1),
)  # fmt: skip


def fixed(*shape: int) -> Tensor:
    """Numbers in [-1, 1) whose products and sums have to be rounded."""
    count = torch.Size(shape).numel()
    values = [(i * i * 62089911 + i * 40503 + 12345) % 2147483647 for i in range(1, count + 1)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape) / 1073741823.5 - 1


def _results() -> Iterator[Tensor]:
    for b, m, k, n in PRODUCTS:
        X, Y = fixed(b, m, k), fixed(b, k, n)
        yield torch.bmm(X, Y)
        yield X @ X.mT
        yield X.mT @ X
        yield X[0] @ Y[0]
        if m == k:
            S = X @ X.mT / k + torch.eye(k, dtype=torch.float64)
            L = torch.linalg.cholesky_ex(S)[0]
            yield L
            yield torch.cholesky_inverse(L)
            yield torch.linalg.solve(S, Y)
            yield torch.einsum("abc,abc->a", S, X)
    for count in (3, 7, 8, 30, 66, 200):
        x, y = fixed(count), fixed(count).flip(0)
        positive = x.abs() + 0.125
        yield from (positive.sqrt(), positive.rsqrt(), positive.log2(), x.exp2())
        yield from (positive.pow(p) for p in (0.125, -1.0, -0.5, -1 / 3, -0.25, -0.2))
        yield from (x.sum(), x.mean(), torch.linalg.vector_norm(x), (x * y).sum())
        yield from (x.lerp(y, 0.3), x.addcmul(x, y, value=0.7), x.addcdiv(y, positive, value=-0.3))
        yield x.add(y, alpha=0.3)
        yield torch.view_as_real(torch.fft.rfft(x))
        yield torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(y), count)
        yield torch.fft.rfft(x).abs()
        grid = fixed(5, count, 4)
        yield from (grid.sum(0), grid.sum(1), grid.sum(2), grid.square().mean(1))


def probe() -> str:
    """A hash of the bits of some results."""
    digest = hashlib.sha256()
    for result in _results():
        for value in result.flatten().tolist():
            digest.update(value.hex().encode())
    return digest.hexdigest()
