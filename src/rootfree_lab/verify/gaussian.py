"""The Gaussian behind root-free methods, with S⁻¹ as its covariance (the paper's section 4).

They are natural-gradient descent on 𝓛 = E_q ℓ - γ·entropy(q), q = N(μ, S⁻¹), with ∂𝓛/∂S⁻¹ =
½(H - γS): H, whatever its form, comes to the parameters of S⁻¹ by the chain rule. Here autograd
takes the derivatives, the expectation is a sum over nodes, and the metric is the Fisher matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

import rootfree
from rootfree.structures import make_structure
from rootfree_lab.verify.claim import Measured, below, claim, largest, relative_difference
from rootfree_lab.verify.draws import mixing, normal
from rootfree_lab.verify.methods import (
    IF_SHAMPOO,
    MATRIX,
    RF_FULL,
    RF_SHAMPOO,
    TENSOR,
    Constant,
    inverses,
    walk,
)

EQUAL = 1e-11  # systems of up to 16 equations, conditioning to 1e3
BETA = 0.1
STEP: dict[str, Any] = {"precond_lr": BETA, "damping": 0.0, "batch_size": 1}
STRUCTURES = (
    "dense", "diagonal", "block_diagonal:2", "lower_triangular", "upper_triangular",
    "hierarchical:2", "lower_toeplitz", "upper_toeplitz",
)  # fmt: skip


def hessian(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """∇²f, in reverse mode twice."""
    return jacrev(jacrev(f))  # type: ignore[no-any-return]


def nodes(d: int) -> tuple[Tensor, Tensor]:
    """Points (n, d) and weights (n,) that average polynomials to degree 7 over N(0, I)."""
    points, weights = np.polynomial.hermite_e.hermegauss(4)
    grid = torch.tensor(list(product(points, repeat=d)))
    return grid, torch.tensor(list(product(weights / weights.sum(), repeat=d))).prod(1)


def _expected(loss: Callable[[Tensor], Tensor], mu: Tensor, cov: Tensor) -> Tensor:
    """E ℓ(w), w ~ N(μ, cov)."""
    z, weights = nodes(len(mu))
    return (weights * vmap(loss)(mu + z @ torch.linalg.cholesky(cov).mT)).sum()


def _drawn(generator: torch.Generator, d: int) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """A convex loss of degree four, μ and S⁻¹."""
    A = mixing(generator, d, d)
    X, y = normal(generator, 2 * d, d), normal(generator, 2 * d)
    return lambda w: ((X @ w - y) ** 4).sum() / 4, normal(generator, d), A @ A.mT


@claim(
    "gaussian-identities",
    "∂E ℓ/∂μ = E ∇ℓ and 2·∂E ℓ/∂S⁻¹ = E ∇²ℓ over a Gaussian with covariance S⁻¹.",
)
def identities(generator: torch.Generator) -> Measured:
    """∂E ℓ/∂μ = E ∇ℓ and 2 ∂E ℓ/∂S⁻¹ = E ∇²ℓ."""
    loss, mu, cov = _drawn(generator, 3)
    by_mu, by_cov = jacrev(_expected, argnums=(1, 2))(loss, mu, cov)
    z, weights = nodes(3)
    w = mu + z @ torch.linalg.cholesky(cov).mT
    gradient = torch.einsum("n,ni->i", weights, vmap(jacrev(loss))(w))
    curvature = torch.einsum("n,nij->ij", weights, vmap(hessian(loss))(w))
    pairs = ((by_mu, gradient), (by_cov + by_cov.mT, curvature))
    return below(largest(relative_difference(*pair) for pair in pairs), EQUAL, "ℓ of degree 4")


@claim(
    "gaussian-step",
    "RF full matrix: a step of S is one of natural-gradient descent over the Gaussian.",
)
def full_step(generator: torch.Generator) -> Measured:
    """RF full with H = E ∇²ℓ: one step of S is one of natural-gradient descent on 𝓛."""
    d, differences = 3, []
    for gamma in (0.0, 1.0):
        loss, mu, cov = _drawn(generator, d)
        S = torch.linalg.inv(cov)

        def objective(S: Tensor, loss: Any = loss, mu: Tensor = mu, gamma: float = gamma) -> Tensor:
            return _expected(loss, mu, torch.linalg.inv(S)) + gamma / 2 * torch.logdet(S)

        metric = hessian(partial(_divergence, cov=cov))(S).reshape(d * d, d * d)
        step = torch.linalg.solve(metric, jacrev(objective)(S).flatten()).view(d, d)
        H = 2 * jacrev(_expected, argnums=2)(loss, mu, cov)
        p = nn.Parameter(mu.clone())
        start = [torch.linalg.cholesky(S).mT]
        optimizer = RF_FULL.make(p, start, curvature=Constant(H, (d,)), gamma=gamma, **STEP)
        (found,) = inverses(walk(optimizer, p, [torch.ones_like(p)]))
        differences.append(relative_difference(torch.linalg.inv(found), S - BETA * step))
    return below(largest(differences), EQUAL, "γ = 0 and 1, ℓ of degree 4, d = 3")


def _divergence(S: Tensor, cov: Tensor) -> Tensor:
    """KL(N(0, cov) ‖ N(0, S⁻¹)) but for a constant; its Hessian at S = cov⁻¹ is Fisher's matrix."""
    return (torch.trace(S @ cov) - torch.logdet(S)) / 2


@claim(
    "gaussian-blocks",
    "S = S_C ⊗ S_K: Fisher's matrix is singular, its blocks are -d/2·∂S_C⁻¹/∂S_C and alike.",
)
def fisher_blocks(generator: torch.Generator) -> Measured:
    """Fisher's matrix of S = S_C ⊗ S_K: its blocks, and the direction in which it is singular."""
    p, d = 2, 3
    C, K = (A @ A.mT for A in (mixing(generator, p, p), mixing(generator, d, d)))
    cov = torch.linalg.inv(torch.kron(C, K))

    def divergence(parameters: Tensor) -> Tensor:
        c, k = parameters.split((p * p, d * d))
        return _divergence(torch.kron(c.view(p, p), k.view(d, d)), cov)

    metric = hessian(divergence)(torch.cat([C.flatten(), K.flatten()]))
    differences = []
    for S, others, rows in ((C, d, slice(0, p * p)), (K, p, slice(p * p, None))):
        n = len(S)
        block = -others / 2 * jacrev(torch.linalg.inv)(S).reshape(n * n, n * n)
        # As forms of symmetric matrices, which are all that S can change by.
        E = torch.eye(n * n, dtype=S.dtype).view(-1, n, n)
        E = (E + E.mT).flatten(1)
        differences.append(relative_difference(E @ metric[rows, rows] @ E.mT, E @ block @ E.mT))
    null = torch.cat([C.flatten(), -K.flatten()])  # c·S_C ⊗ S_K/c is the same for all c
    differences.append(float((metric @ null).norm() / (metric.norm() * null.norm())))
    return below(largest(differences), EQUAL, "F_CC, F_KK, and F·(S_C, -S_K) = 0")


@claim("gaussian-local", "The local coordinates C·exp(η/√2d) are orthonormal.")
def local_coordinates(generator: torch.Generator) -> Measured:
    """Fisher's matrix of η in C = C₀·exp(η/√2d), symmetric η, at the origin against I."""
    differences = []
    for p, d in ((2, 3), (3, 2)):
        C, K = mixing(generator, p, p), mixing(generator, d, d)
        basis = _symmetric_basis(p)

        def covariance(
            t: Tensor, C: Tensor = C, K: Tensor = K, basis: Tensor = basis, scale: float = local(d)
        ) -> Tensor:
            moved = C @ torch.linalg.matrix_exp(scale * torch.einsum("k,kij->ij", t, basis))
            return torch.kron(moved @ moved.mT, K @ K.mT)

        metric = _fisher(covariance, len(basis))
        differences.append(relative_difference(metric, torch.eye(len(basis), dtype=metric.dtype)))
    return below(largest(differences), EQUAL, "C of size 2 and 3")


def local(d: int) -> float:
    """1/√2d, the scale of the local coordinates."""
    return 1 / math.sqrt(2 * d)


def _symmetric_basis(n: int) -> Tensor:
    """Orthonormal symmetric matrices."""
    E = torch.eye(n * n, dtype=torch.float64).view(n, n, n, n)
    upper = [
        E[i, j] if i == j else (E[i, j] + E[j, i]) / 2**0.5 for i in range(n) for j in range(i, n)
    ]
    return torch.stack(upper)


def _fisher(covariance: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """½ tr(Σ⁻¹∂ᵢΣ Σ⁻¹∂ⱼΣ) at the origin of the parameters of Σ."""
    origin = torch.zeros(count, dtype=torch.float64)
    changes = jacrev(covariance)(origin).movedim(-1, 0)
    relative = torch.linalg.solve(covariance(origin), changes)
    return torch.einsum("aij,bji->ab", relative, relative) / 2


def _curvatures(
    generator: torch.Generator, shape: tuple[int, ...]
) -> list[tuple[rootfree.SumOfOuterProducts | Any, Tensor]]:
    """Forms that the library takes H in, each with H as a matrix."""
    d = torch.Size(shape).numel()
    V, h = normal(generator, 2 * d, *shape) / d, normal(generator, *shape)
    Us = [A @ A.mT for A in (mixing(generator, n, n) for n in shape)]
    return [
        (rootfree.SumOfOuterProducts(V), V.flatten(1).mT @ V.flatten(1)),
        (rootfree.KroneckerCurvature(tuple(Us), shape), reduce(torch.kron, Us)),
        (rootfree.DiagonalCurvature(h), h.abs().flatten().diag()),
    ]


@claim("chain-rule", "RF-Shampoo: any H is projected on its factors by the chain rule.")
def chain_rule(generator: torch.Generator) -> Measured:
    """RF-Shampoo: Sₙ + β₂/D₋ₙ·∂tr(S⁻¹M)/∂Sₙ⁻¹ with M = H - γS, for every form of H."""
    differences = []
    for shape in (MATRIX, TENSOR):
        for H, dense in _curvatures(generator, shape):
            As = [mixing(generator, d, d) for d in shape]
            Ss = [A.mT @ A for A in As]
            M = dense - reduce(torch.kron, Ss)
            covs = [torch.linalg.inv(S) for S in Ss]
            trace = lambda *Xs, M=M: torch.trace(reduce(torch.kron, Xs) @ M)  # noqa: E731
            slopes = jacrev(trace, argnums=tuple(range(len(covs))))(*covs)
            wanted = [
                S + BETA * len(S) / M.shape[0] * slope for S, slope in zip(Ss, slopes, strict=True)
            ]
            p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
            optimizer = RF_SHAMPOO.make(p, As, curvature=Constant(H), gamma=1.0, **STEP)
            state = walk(optimizer, p, [torch.ones_like(p)])
            found = [torch.linalg.inv(X) for X in inverses(state)]
            differences.append(
                relative_difference(reduce(torch.kron, found), reduce(torch.kron, wanted))
            )
    return below(largest(differences), EQUAL, "outer products, Kronecker, diagonal; 2 and 3 axes")


@claim(
    "chain-rule-structures",
    "IF-Shampoo: a step of a factor of any structure is one of natural-gradient descent.",
)
def structured_step(generator: torch.Generator) -> Measured:
    """IF-Shampoo with factors of any structure: one step is one of natural-gradient descent.

    Each axis has its own block of Fisher's matrix. Where the structure holds rotations, which leave
    KKᵀ alone, the shortest step counts.
    """
    differences = []
    for name in STRUCTURES:
        structures = [make_structure(name, d) for d in MATRIX]
        eyes = [s.identity(1, dtype=torch.float64, device="cpu") for s in structures]
        packed = [K + 0.2 * normal(generator, *K.shape) for K in eyes]
        Ks = [s.unpack(K)[0] for s, K in zip(structures, packed, strict=True)]
        cov = _covariance(Ks)
        H, dense = _curvatures(generator, MATRIX)[0]
        M = dense - torch.linalg.inv(cov)
        moved = []
        for n, structure in enumerate(structures):
            basis = structure.unpack(
                torch.eye(packed[n].numel(), dtype=M.dtype).view(-1, *packed[n].shape[1:])
            )

            def covariance(t: Tensor, n: int = n, basis: Tensor = basis, Ks: Any = Ks) -> Tensor:
                new = [*Ks]
                new[n] = Ks[n] + Ks[n] @ torch.einsum("k,kij->ij", t, basis)
                return _covariance(new)

            origin = torch.zeros(len(basis), dtype=M.dtype)
            slope = jacrev(lambda t, c=covariance, M=M: torch.trace(c(t) @ M) / 2)(origin)
            step = torch.linalg.pinv(_fisher(covariance, len(basis)), hermitian=True) @ slope
            moved.append(Ks[n] - BETA * Ks[n] @ torch.einsum("k,kij->ij", step, basis))
        p = nn.Parameter(torch.zeros(MATRIX, dtype=M.dtype))
        curvature = Constant(H)
        optimizer = IF_SHAMPOO.build(
            [p], structure=name, curvature=curvature, gamma=1.0, factor_norm=None, **STEP
        )
        for n, K in enumerate(packed):
            optimizer.state[p][f"block0.factor{n}"].copy_(K)
        state = walk(optimizer, p, [torch.ones_like(p)])
        new = [s.unpack(state[f"block0.factor{n}"])[0] for n, s in enumerate(structures)]
        differences.append(relative_difference(_covariance(new), _covariance(moved)))
    return below(largest(differences), EQUAL, f"{len(STRUCTURES)} structures, H not of their form")


def _covariance(Ks: Sequence[Tensor]) -> Tensor:
    """S⁻¹ = ⊗ KₙKₙᵀ."""
    return reduce(torch.kron, [K @ K.mT for K in Ks])
