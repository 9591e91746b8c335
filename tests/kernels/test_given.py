"""Given curvature by kernels: KᵀUK in the precision of fp32, and whole refreshes as by the rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import rootfree
from kernels.devices import DEVICE, close, normal
from kernels.test_direction import (
    assert_alike,
    by_kernels,
    for_kernels,
    gradients,
    options,
    problem,
)
from rootfree.curvature import OuterProducts
from rootfree.curvature.kronecker import KroneckerBlocks, Part
from rootfree.curvature.stacking import MixedCurvature
from rootfree.kernels import axis_products, factors
from rootfree.kernels.given import MatrixUnits, product, split
from rootfree.kernels.halves import joined
from rootfree.methods.inverse_free import direction
from rootfree.recorders import KFACRecorder

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def with_condition(d: int, condition: float) -> torch.Tensor:
    """(2, d, d) in fp32, with eigenvalues from 1 down to 1/condition."""
    Q = torch.linalg.qr(normal(2, d, d).double())[0]
    values = torch.logspace(0, -math.log10(condition), d, dtype=FP64, device=DEVICE)
    return (Q * values @ Q.mT).float()


def root_of_inverse(U: torch.Tensor) -> torch.Tensor:
    """U^(-½) in bf16: where a factor arrives."""
    values, Q = torch.linalg.eigh(U.double())
    return (Q * values.clamp(min=1e-12).rsqrt().unsqueeze(1) @ Q.mT).bfloat16()


@pytest.mark.parametrize(("d", "size"), [(37, 40), (64, 64), (136, 136)])
def test_the_product_is_that_of_fp32(d, size):
    """Of even sizes and of others; sums of d numbers in fp32, and what two summands leave of UK."""
    U, K = normal(2, d, d), normal(2, size, size, seed=1, dtype=BF16)
    unit = torch.tensor([4.0, 0.5], device=DEVICE)
    summands = split(U, size, count=3, unit=unit)
    whole = axis_products.padded(U, (size, size)).double() / unit[:, None, None]
    assert torch.equal(summands.double().sum(1), whole)
    exact = (whole @ K.double()).mT
    close(product(summands, K).double().sum(1), exact, rtol=2.0**-16, atol=1e-6)
    S = U + U.mT
    got = product(product(split(S, size, count=3), K), K, last=True)
    S = axis_products.padded(S, (size, size)).double()
    close(got, K.double().mT @ S @ K.double(), rtol=0.0, atol=8e-6)


def in_pieces(x: torch.Tensor, count: int) -> torch.Tensor:
    """What is left of x, in float64, when it is written as a sum of so many bf16 numbers."""
    rest, total = x, torch.zeros_like(x, dtype=FP64)
    for _ in range(count):
        piece = rest.bfloat16().float()
        rest, total = rest - piece, total + piece
    return total


@pytest.mark.parametrize(("count", "bound"), [(1, 2.0**-8), (2, 2.0**-17), (3, 0.0)])
def test_what_a_sum_of_bf16_numbers_leaves_over(count, bound):
    x = normal(10_000) * torch.logspace(-20, 20, 10_000, device=DEVICE)
    left = ((in_pieces(x, count) - x.double()) / x.double()).abs().max().item()
    assert bound / 2 <= left <= bound


def test_an_ill_conditioned_curvature_stays_positive_definite():
    """κ = 10⁶: with K near U^(-½), KᵀUK is near I only if U loses less than 10⁻⁶ of itself."""
    U = with_condition(40, 1e6)
    K = root_of_inverse(U)
    wide = K.double()
    exact = wide.mT @ U.double() @ wide
    size = exact.flatten(1).norm(dim=1)

    def error(S: torch.Tensor) -> float:
        return ((S.double() - exact).flatten(1).norm(dim=1) / size).max().item()

    by_kernel = MatrixUnits(40).project_congruence(K, U)
    assert error(by_kernel) <= 2 * error(K.float().mT @ (U @ K.float()))
    assert (torch.linalg.eigvalsh(by_kernel.double()) > -1e-3).all()
    two = wide.mT @ in_pieces(U, 2) @ wide  # without the third summand, everything else exact
    assert error(two) > 10 * error(by_kernel)
    one = wide.mT @ in_pieces(U, 1) @ wide
    assert (torch.linalg.eigvalsh(one) < -1).any()


def test_diagonal_curvature():
    K, u = normal(2, 35, 35, dtype=BF16), normal(2, 35, seed=1).square()
    units = MatrixUnits(35)
    got = units.unpack(units.project_congruence(units.pack(K), u))
    close(got, K.double().mT @ (u.double().unsqueeze(-1) * K.double()), rtol=0.0, atol=8e-6)


def kronecker(shape: tuple[int, ...], seed: int) -> KroneckerBlocks:
    parts = []
    for n, d in enumerate(shape):
        A = normal(2, d, d, seed=50 * seed + n)
        parts.append(Part((n,), A @ A.mT / d))
    return KroneckerBlocks(tuple(parts), shape)


# the odd ones, above 32, are padded; three axes; low memory
@pytest.mark.parametrize(
    ("shape", "changes"),
    [((37, 41), {}), ((5, 33, 4), {}), ((12, 35), {"factor_dtype": BF16})],
    ids=str,
)
def test_a_refresh_equals_the_rule(shape, changes):
    group = options(**changes)
    structures, state = problem(shape, group)
    for i in range(3):
        G, H = gradients(shape, i), kronecker(shape, i) if i != 1 else None
        mine = {k: t.clone() for k, t in state.items()} if changes else for_kernels(state, shape)
        before = {name: t.clone() for name, t in state.items()}
        U = G.clone()
        by_kernels(group, mine, U, refresh=H is not None, H=H)
        expected = direction(group, structures, state, G, H)
        assert_alike(H is not None, before, joined(mine), U, state, expected)


def test_blocks_without_a_given_curvature_keep_the_rate_of_one_gradient():
    """β₂ is less for their long axes (rate_by_rank), beside blocks whose curvature is given."""
    shape, group = (40, 3), options(rate_by_rank=True)
    structures, state = problem(shape, group)
    for i in range(2):
        G = gradients(shape, i)
        own = OuterProducts(G[1:].unsqueeze(-1), scale=group["batch_size"] ** 0.5)
        known = kronecker(shape, i).rows(slice(0, 1))
        H = MixedCurvature((([slice(0, 1)], known), ([slice(1, 2)], own)))
        mine, U = for_kernels(state, shape), G.clone()
        before = {name: t.clone() for name, t in state.items()}
        by_kernels(group, mine, U, H=H)
        expected = direction(group, structures, state, G, H)
        assert_alike(True, before, joined(mine), U, state, expected)


@pytest.mark.parametrize("has_gram", [True, False])
def test_padding_stays_zero(has_gram):
    """Also where -γI is added; else the norm of h, and products with it, would see it."""
    K = axis_products.padded(normal(2, 37, 37, dtype=BF16), (40, 40))
    traces = [normal(2, 1).square() for _ in range(2)]
    gram = axis_products.padded(normal(2, 37, 37, seed=1), (40, 40))
    seen = (gram if has_gram else gram.bfloat16(), normal(2, 1, seed=2).square())
    table = torch.tensor([0.0] * 5 + [8.0, 0.1, 0.01, 1.0, 0.0, 0.0, 0.0], device=DEVICE)
    words = {"has_gram": has_gram}
    h, sums, _ = factors.tangent((), 0, (37, 37), K, *seen, traces, None, table, None, **words)
    assert h[:, :37, :37].abs().sum() > 0
    assert h[:, 37:].abs().sum() == h[:, :, 37:].abs().sum() == 0
    close(sums.sum(1), h.double().square().sum((1, 2)), rtol=0.02)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(36, 36), nn.Tanh()) for _ in range(2)]).to(
        DEVICE
    )


@pytest.mark.parametrize("kind", ["kfac", "default", "whitening"])
def test_layers_of_odd_sizes_have_room_in_the_stack(kind):
    """[W b] is 36×37 and in memory 40×40, by kernels as by the rules."""
    models, optimizers, recorders = [layers(), layers()], [], []
    for model, fused in zip(models, (True, False), strict=True):
        recorders.append(KFACRecorder(model) if kind == "kfac" else None)
        method = rootfree.IFWhitening if kind == "whitening" else rootfree.IFShampoo
        words = {} if kind == "whitening" else {"batch_size": 8}
        given = {"curvature": recorders[-1]} if kind == "kfac" else {}
        made = method(model.parameters(), matmul_dtype=BF16, fused=fused, **words, **given)
        optimizers.append(made)
    start = [p.detach().clone() for p in models[0].parameters()]
    for i in range(2):
        x = normal(8, 36, seed=i)
        for model, optimizer, recorder in zip(models, optimizers, recorders, strict=True):
            optimizer.zero_grad()
            if recorder is None:
                model(x).square().mean().backward()
            else:
                with recorder:
                    model(x).square().mean().backward()
            optimizer.step()
    for p, q, old in zip(models[0].parameters(), models[1].parameters(), start, strict=True):
        assert (p - q).norm() <= 0.03 * (q - old).norm()
        mine = joined(optimizers[0].state[p])
        for name, t in optimizers[1].state[q].items():
            assert mine[name].shape == t.shape
            assert (mine[name].float() - t.float()).norm() <= 0.02 * t.float().norm(), name
