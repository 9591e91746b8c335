"""Other curvature with products in half precision: close to fp32, and inside its range."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import rootfree
from curvature.given import KINDS, Given, draw

HALVES = [torch.bfloat16, torch.float16]


def factors_after(
    kind: str, dtype: torch.dtype | None, *, scale: float, steps: int, shape=(24, 32)
) -> list[torch.Tensor]:
    """The dense factors of IF-Shampoo on a fixed curvature; fp32 parameters."""
    rng = np.random.default_rng(0)
    p = nn.Parameter(torch.zeros(shape))
    given = Given()
    optimizer = rootfree.IFShampoo(
        [p],
        batch_size=1,
        curvature=given,
        precond_lr=0.2,
        update_every=1,
        structure="dense",
        matmul_dtype=dtype,
        damping=1e-3 * scale**2,
    )
    for _ in range(steps):
        given.answers = {p: to(draw(kind, shape, rng, scale), torch.float32)}
        p.grad = torch.tensor(scale * rng.normal(size=shape)).float()
        optimizer.step()
    state = optimizer.state[p]
    assert p.isfinite().all()
    return [state[key] for key in sorted(state) if key.startswith("block0.factor")]


def to(H, dtype: torch.dtype):
    if isinstance(H, rootfree.SumOfOuterProducts):
        return rootfree.SumOfOuterProducts(H.V.to(dtype))
    if isinstance(H, rootfree.DiagonalCurvature):
        return rootfree.DiagonalCurvature(H.h.to(dtype))
    return rootfree.KroneckerCurvature(tuple(U.to(dtype) for U in H.factors), H.axes)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), list(itertools.product(KINDS, HALVES)))
def test_half_precision_follows_fp32(kind, dtype):
    wide = factors_after(kind, None, scale=0.1, steps=30)
    narrow = factors_after(kind, dtype, scale=0.1, steps=30)
    for a, b in zip(narrow, wide, strict=True):
        # 30 steps of 2⁻⁸ that average out; the products of Kronecker forms are in fp32 anyway
        assert (a - b).norm() / b.norm() < 0.01


def test_ill_conditioned_factors_keep_the_preconditioner_positive_definite():
    """KᵀUK in bf16 would have eigenvalues near -1 at a condition number of 10⁴."""
    d = 32
    Q = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(0)))[0]
    U = Q @ torch.logspace(0, -4, d).diag() @ Q.mT
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        p, given = nn.Parameter(torch.zeros(d, d)), Given()
        optimizer = rootfree.IFShampoo(
            [p],
            batch_size=1,
            curvature=given,
            precond_lr=0.5,
            update_every=1,
            damping=0.0,
            matmul_dtype=dtype,
        )
        p.grad = torch.ones(d, d)
        given.answers = {p: rootfree.KroneckerCurvature((U, U), (d, d))}
        for _ in range(60):
            optimizer.step()
        K = optimizer.state[p]["block0.factor0"][0]
        results.append(K @ K.mT)
    exact, *halves = results
    assert torch.linalg.cond(exact) > 1e3  # it has gone most of the way to U⁻¹
    for half in halves:
        assert (half - exact).norm() / exact.norm() < 0.05


# fp16 ends at 6·10⁴, its squares at 2.5·10²; bf16 and fp32 at 3·10³⁸
@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-7, 1e6])
@pytest.mark.parametrize(("kind", "dtype"), list(itertools.product(KINDS, [None, *HALVES])))
def test_the_scale_of_the_curvature_does_not_matter(kind, dtype, scale):
    """The start follows the trace, so factors only change by that scale."""
    reference = factors_after(kind, dtype, scale=1.0, steps=10)
    for a, b in zip(factors_after(kind, dtype, scale=scale, steps=10), reference, strict=True):
        # K ~ H^(-1/4) on each of two axes
        torch.testing.assert_close(a * scale**0.5, b, rtol=0.05, atol=0.02 * float(b.abs().max()))


def test_many_rows_do_not_overflow():
    """2¹⁷ columns with entries near the largest: their fp16 gram is scaled down."""
    p = nn.Parameter(torch.zeros(4, 8))
    given = Given()
    optimizer = rootfree.IFShampoo(
        [p], batch_size=1, curvature=given, matmul_dtype=torch.float16, structure="dense"
    )
    given.answers = {p: rootfree.SumOfOuterProducts(torch.ones(2**15, 4, 8))}
    p.grad = torch.ones(4, 8)
    optimizer.step()
    for key in ("block0.factor0", "block0.factor1"):
        assert optimizer.state[p][key].isfinite().all()
    assert p.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "optimizer",
    [rootfree.RFRMSprop, rootfree.RFShampoo, rootfree.IFShampoo, rootfree.RFFullAdagrad],
)
def test_parameters_and_curvature_may_be_in_half_precision(optimizer, kind, dtype):
    p, given = nn.Parameter(torch.zeros(4, 6, dtype=dtype)), Given()
    made = optimizer([p], batch_size=4, curvature=given)
    rng = np.random.default_rng(0)
    for _ in range(3):
        given.answers = {p: to(draw(kind, (4, 6), rng), dtype)}
        p.grad = torch.ones_like(p)
        made.step()
    assert p.isfinite().all()
    assert (p != 0).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "optimizer", [rootfree.RFShampoo, rootfree.IFShampoo, rootfree.RFFullAdagrad]
)
def test_a_model_may_be_cast_after_the_optimizer_was_made(optimizer, kind):
    p, given = nn.Parameter(torch.ones(4, 6)), Given()
    made = optimizer([p], batch_size=4, curvature=given, update_every=1)
    rng = np.random.default_rng(0)
    for dtype in (torch.float32, torch.float64, torch.float32):
        p.data = p.data.to(dtype)
        given.answers = {p: to(draw(kind, (4, 6), rng), dtype)}
        p.grad = torch.ones_like(p)
        made.step()
    assert p.isfinite().all()
