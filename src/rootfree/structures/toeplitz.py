"""Lower and upper triangular Toeplitz matrices: one number per diagonal, products by FFT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from rootfree.structures.base import Structure, wide_dtype


@dataclass(frozen=True)
class _Toeplitz(Structure):
    """Packed (d,): c, with c[j] on the j-th diagonal below (lower) or above (upper) the main one.

    A lower matrix times x is the convolution of c and x, cut at d; its transpose, which is the
    upper matrix of the same c, makes a correlation of it. Both cost O(d log d) a column. FFT errors
    are relative to the norm of the result, not to each of its entries.

    Reversing the order of the axis turns K into Kᵀ and keeps the sums along the diagonals of a
    symmetric matrix: hence products, projections and norms are the same for lower and upper.
    Π(M): the mean of each diagonal of M, all but the main one twice.
    """

    _upper: ClassVar[bool]

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return (self.d,)

    def unpack(self, K: Tensor) -> Tensor:
        # row i is the window c[i], c[i-1], ..., c[i-d+1], where c is 0 at negative places
        lower = pad(K, (self.d - 1, 0)).unfold(1, self.d, 1).flip(-1)
        return lower.mT if self._upper else lower

    def pack(self, M: Tensor) -> Tensor:
        return (M[:, 0, :] if self._upper else M[:, :, 0]).contiguous()

    def project(self, M: Tensor) -> Tensor:
        d = self.d
        # Rows of length 2d, read as rows of length 2d-1: row i moves i to the right, so that, with
        # the columns reversed, each diagonal becomes a column; the main one is column d-1.
        skewed = pad(M.flip(-1), (0, d)).flatten(1)[:, : d * (2 * d - 1)].view(-1, d, 2 * d - 1)
        return self._tangent(skewed[:, :, d - 1 :].sum(1, dtype=wide_dtype(M.dtype))).to(M.dtype)

    def _tangent(self, sums: Tensor) -> Tensor:
        """Sums along the diagonals 0, ..., d-1 of a symmetric matrix (b, d) -> Π of it."""
        weights = 2 / self._multiplicities(sums)
        weights[0] /= 2
        return weights * sums

    def _multiplicities(self, like: Tensor) -> Tensor:
        """How often each packed entry occurs: d, d-1, ..., 1."""
        return torch.arange(self.d, 0, -1, dtype=like.dtype, device=like.device)

    def add_to_diagonal_(self, M: Tensor, value: float) -> Tensor:
        M[:, 0].add_(value)
        return M

    def apply(self, K: Tensor, X: Tensor) -> Tensor:
        return _convolve(K.unsqueeze(1), X.mT, correlate=self._upper).mT

    def apply_transposed(self, K: Tensor, X: Tensor) -> Tensor:
        return _convolve(K.unsqueeze(1), X.mT, correlate=not self._upper).mT

    def product(self, K: Tensor, M: Tensor) -> Tensor:
        return _convolve(K, M).contiguous()

    def inverse(self, K: Tensor) -> Tensor:
        # The power series 1/c by Newton's iteration: twice as many places are right each time. In
        # float64: an FFT rounds relative to the largest place.
        c = K.double()
        series, places = c[:, :1].reciprocal(), 1
        while places < self.d:
            places = min(2 * places, self.d)
            series = pad(series, (0, places - series.shape[1]))
            rest = -_convolve(c[:, :places], series)
            rest[:, 0] += 2
            series = _convolve(series, rest)
        return series.to(wide_dtype(K.dtype)).contiguous()

    def project_gram(self, X: Tensor) -> Tensor:
        # Σᵢ (XXᵀ)[i+j, i] = Σᵢᵣ X[i+j, r] X[i, r]: autocorrelations, summed before the way back
        n = _fft_length(self.d)
        spectrum = torch.fft.rfft(X.mT.to(wide_dtype(X.dtype)), n)
        # in place, and over r before re and im: one pass over the spectrum, the largest tensor here
        power = torch.view_as_real(spectrum).square_().sum(1).sum(-1)
        return self._tangent(torch.fft.irfft(power, n)[:, : self.d]).to(X.dtype)

    def project_factor_gram(self, K: Tensor) -> Tensor:
        # Σᵢ (KᵀK)[i+j, i] = Σₘ (d-j-m) c[m+j] c[m]: place m+j carries its multiplicity, d-(m+j)
        c = K.to(wide_dtype(K.dtype))
        return self._tangent(_convolve(c, self._multiplicities(c) * c, correlate=True)).to(K.dtype)

    def trace(self, M: Tensor) -> Tensor:
        return self.d * M[:, 0].to(wide_dtype(M.dtype))

    def spectral_bound(self, M: Tensor, *, dtype: torch.dtype) -> Tensor:
        # ‖M‖₂ <= max |f| on the circle, f(z) = Σ c[j] zʲ. On 8d points a polynomial of this degree
        # reaches cos(π/8) of its maximum (Bernstein).
        points = torch.fft.rfft(M.to(wide_dtype(M.dtype)), 8 * self.d).abs()
        bound: Tensor = points.amax(1) / math.cos(math.pi / 8)
        return bound

    def squared_norm(self, K: Tensor) -> Tensor:
        c = K.to(wide_dtype(K.dtype))
        return (self._multiplicities(c) * c.square()).sum(1)


@dataclass(frozen=True)
class LowerToeplitz(_Toeplitz):
    """Lower triangular Toeplitz matrices; packed: the first column."""

    kind = "lower_toeplitz"
    _upper = False


@dataclass(frozen=True)
class UpperToeplitz(_Toeplitz):
    """Upper triangular Toeplitz matrices; packed: the first row."""

    kind = "upper_toeplitz"
    _upper = True


def _convolve(c: Tensor, x: Tensor, *, correlate: bool = False) -> Tensor:
    """``y[i] = Σⱼ c[j] x[i-j]``, i < d, along the last axis (d); c broadcasts to x.

    Or, with `correlate`, ``y[i] = Σⱼ c[j] x[i+j]``.
    """
    d, n, wide = x.shape[-1], _fft_length(x.shape[-1]), wide_dtype(x.dtype)
    kernel = torch.fft.rfft(c.to(wide), n)
    spectrum = torch.fft.rfft(x.to(wide), n).mul_(kernel.conj() if correlate else kernel)
    y: Tensor = torch.fft.irfft(spectrum, n)[..., :d]
    return y.to(x.dtype)


@lru_cache(maxsize=1024)
def _fft_length(d: int) -> int:
    """The smallest length without prime factors above 5 (fast FFT) that holds 2d-1 (no wrap)."""
    n = 2 * d - 1
    while pow(30, n.bit_length(), n) != 0:  # those lengths divide a power of 2·3·5
        n += 1
    return n
