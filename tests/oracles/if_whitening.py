"""Inverse-free whitening (11), and the method it follows: Shampoo with the root, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oracles.full_matrix import FactorNorm, matrix_norm
from oracles.kronecker import Array, apply, kron_all, others_size, partial_trace, squeeze


class IFWhiteningOracle:
    """P = P_1 x ... x P_N as one dense matrix of all axes; the P_n themselves are kept.

    E_n = partial trace of P(ggᵀ + λI)P over all axes but n / D_{-n} - I, λ = ρv
    P_n <- (I - β₂/2·Ê_n)P_n(I - β₂/2·Ê_n), Ê_n = E_n/max(1, ‖E_n‖)
    M <- α₁M + U; the step is U + α₁M (Nesterov), scaled to RMS r
    (by at most what white noise needs); W <- (1 - β₁κ)W - β₁·step
    A fast start raises β₂ to 1 - t/(t + 50) and lowers that limit to its t/200-th part.

    `masks`: one 0-1 matrix per axis, the entries that the structure has; None: all.
    """

    def __init__(
        self,
        param: Array,
        *,
        lr: float,
        precond_lr: float,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        damping: float = 1e-6,
        update_every: int = 1,
        fast_start: bool = True,
        update_rms: float | None = 0.2,
        max_update_rms: float | None = 1.0,
        factor_norm: FactorNorm = "spectral",
        masks: Sequence[Array] | None = None,
    ) -> None:
        self.param = np.array(param, dtype=np.float64)
        self.dims = squeeze(self.param).shape
        self.lr, self.alpha1, self.nesterov = lr, momentum, nesterov
        self.precond_lr, self.fast_start = precond_lr, fast_start
        self.kappa, self.rho, self.every, self.rms = weight_decay, damping, update_every, update_rms
        self.cap = max_update_rms
        # What is left of one direction in the steps to come; the squares of many add up.
        left = [momentum ** (k + int(nesterov)) for k in range(1000)]
        left[0] += float(nesterov)
        self.least = float(np.linalg.norm(left))
        self.factor_norm: FactorNorm = factor_norm
        self.masks = masks or [np.ones((d, d)) for d in self.dims]
        self.factors = [np.eye(d) for d in self.dims]  # P_n
        self.mean_square: float | None = None  # v
        self.m = np.zeros_like(self.param)
        self.count = 0

    @property
    def beta2(self) -> float:
        beta2 = self.precond_lr
        if self.fast_start and self.factor_norm is not None:
            beta2 = max(beta2, 1 - self.count / (self.count + 50))
        with np.errstate(divide="ignore"):  # a refresh in the place of T of them
            return float(-np.expm1(self.every * np.log1p(-beta2)))

    def step(self, grad: Array) -> Array:
        grad = np.asarray(grad, dtype=np.float64)
        if self.count % self.every == 0 and grad.any():
            self.refresh(grad)
        u = apply(kron_all(self.factors), grad)
        if self.cap is not None:
            u = u / max(1.0, float(np.sqrt(np.mean(u**2))) / self.cap)
        self.m = self.alpha1 * self.m + u
        step = u + self.alpha1 * self.m if self.nesterov else self.m
        if self.rms is not None:
            least = self.least * (np.clip(self.count / 200, 0, 1) if self.fast_start else 1.0)
            step = step * (self.rms / max(np.sqrt(np.mean(step**2)), least, 1e-30))
        self.param = (1 - self.lr * self.kappa) * self.param - self.lr * step
        self.count += 1
        return self.param

    def refresh(self, grad: Array) -> None:
        square = float(np.mean(grad**2))
        if self.mean_square is None:
            self.mean_square = square
            size = square ** (-1 / (2 * len(self.dims)))
            self.factors = [size * p for p in self.factors]
        else:
            limited = min(square, 1000 * self.mean_square)
            self.mean_square += self.beta2 / 100 * (limited - self.mean_square)
        P, g = kron_all(self.factors), grad.reshape(-1)
        seen = P @ (np.outer(g, g) + self.rho * self.mean_square * np.eye(g.size)) @ P
        moved = []
        for n, (p, mask) in enumerate(zip(self.factors, self.masks, strict=True)):
            trace = partial_trace(seen, self.dims, n) / others_size(self.dims, n)
            E = (trace - np.eye(len(p))) * mask
            size = max(1.0, matrix_norm(E, self.factor_norm))
            left = np.eye(len(p)) - self.beta2 / 2 / size * E
            moved.append(left @ p @ left)
        self.factors = moved


class KLShampooOracle:
    """Shampoo by the Kullback-Leibler divergence, with the root by an eigendecomposition.

    S_n <- (1-w)S_n + w·(G_(n)[x_{j≠n} S_j⁻¹]G_(n)ᵀ/D_{-n} + λ ∏_{j≠n} tr(S_j⁻¹)/d_j·I)
    P_n = S_n^{-½}
    """

    def __init__(self, start: Sequence[Array]) -> None:
        self.factors = [np.linalg.inv(p @ p) for p in start]

    def refresh(self, grad: Array, *, weight: float, lam: float) -> None:
        inverses = [np.linalg.inv(s) for s in self.factors]
        dims = [len(s) for s in self.factors]
        g = grad.reshape(-1)
        H = np.outer(g, g) + lam * np.eye(g.size)
        moved = []
        for n, s in enumerate(self.factors):
            others = kron_all([np.eye(d) if j == n else inverses[j] for j, d in enumerate(dims)])
            term = partial_trace(others @ H, dims, n) / others_size(dims, n)
            moved.append((1 - weight) * s + weight * (term + term.T) / 2)
        self.factors = moved

    @property
    def whitening(self) -> list[Array]:
        """P_n = S_n^{-½}."""
        roots = []
        for s in self.factors:
            values, vectors = np.linalg.eigh(s)
            roots.append(vectors @ np.diag(values**-0.5) @ vectors.T)
        return roots
