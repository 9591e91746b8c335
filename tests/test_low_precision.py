"""Few bits: factors that follow their fp32 trajectory, state that fits, and never a NaN.

The least-squares test of the specification (p=256, d=512, B=128, 200 steps) takes some 10 s a
β₂ and dtype on one core; here it is run at a quarter of each size. At full size,
measured once, largest error of the two factors, β₂ = 0.003, 0.01, 0.05, 0.2, 0.5:
  fp32 accumulator, bf16 products   0.0013 0.0002 0.0004 0.0011 0.0023
  bf16 factors, stochastic rounding 0.54   0.29   0.12   0.03   0.015
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rootfree
from conformance.rows import PAPER
from rootfree.rules import if_shampoo
from rootfree_lab.bench.shapes import vit_b

RATES = [0.003, 0.01, 0.05, 0.2, 0.5]
STEPS = 200
P, D, B = 64, 128, 32


def least_squares(W: nn.Parameter, target: Tensor, generator: torch.Generator) -> Tensor:
    """Inputs of uneven size, noisy targets."""
    x = torch.randn(B, D, generator=generator) * torch.logspace(0, -1, D)
    y = x @ target.T + 0.1 * torch.randn(B, P, generator=generator)
    return (x @ W.T - y).square().sum() / (2 * B)


def convolution(W: nn.Parameter, target: Tensor, generator: torch.Generator) -> Tensor:
    x = torch.randn(B, W.shape[1], 5, 5, generator=generator)
    y = nn.functional.conv2d(x, target)
    y += 0.5 * torch.randn(y.shape, generator=generator)
    return (nn.functional.conv2d(x, W) - y).square().mean(dim=(2, 3)).sum() / (2 * B)


PROBLEMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int]] = {
    "least squares": (least_squares, (P, D), B),
    "convolution": (convolution, (32, 16, 3, 3), B),
}


@pytest.fixture(autouse=True)
def without_balance(monkeypatch):
    """Powers of two that go from factor to factor are no movement (rules/test_balance.py)."""
    monkeypatch.setattr(if_shampoo, "exponents", lambda means: [0 * mean for mean in means])


def factors(optimizer: Any, W: Tensor) -> list[Tensor]:
    return [t for key, t in optimizer.state[W].items() if ".factor" in key]


def movement(
    problem: str,
    beta2: float,
    *,
    lr: float = 1e-3,
    after_step: Callable[[list[Tensor]], None] | None = None,
    **options: Any,
) -> list[Tensor]:
    """K_T - K_0 of every factor, each run on the gradients of its own path."""
    loss, shape, batch = PROBLEMS[problem]
    generator = torch.Generator().manual_seed(0)
    fan_in = math.prod(shape[1:])
    W = nn.Parameter(torch.randn(shape, generator=generator) / fan_in**0.5)
    target = torch.randn(shape, generator=generator) / fan_in**0.5
    words = {**PAPER, "lr": lr, "momentum": 0.9, "damping": 1e-3, **options}
    optimizer = rootfree.IFShampoo([W], batch_size=batch, precond_lr=beta2, **words)
    start = [K.float().clone() for K in factors(optimizer, W)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(W, target, generator).backward()
        optimizer.step()
        if after_step is not None:
            after_step(factors(optimizer, W))
    return [K.float() - K0 for K, K0 in zip(factors(optimizer, W), start, strict=True)]


@cache
def reference(problem: str, beta2: float, factor_norm: str = "frobenius") -> Any:
    return movement(problem, beta2, factor_norm=factor_norm, matmul_dtype=torch.float32)


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


# --- the trajectory of the factors -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta2", "dtype"),
    [*((rate, torch.bfloat16) for rate in RATES), (0.003, torch.float16), (0.5, torch.float16)],
)
def test_factors_follow_fp32_with_products_in_half_precision(beta2, dtype):
    """The default: fp32 accumulator. Required: 2 %; measured: 0.02 to 0.5 % (bf16)."""
    found = movement("least squares", beta2, matmul_dtype=dtype)
    assert max(errors(found, reference("least squares", beta2))) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [None, 1024])
@pytest.mark.parametrize("beta2", [0.003, 0.5])
def test_factors_of_a_convolution_follow_fp32(beta2, block_size):
    """Four factors, and two with the input axes merged. Measured: 0.1 to 1.3 %.

    At lr 1e-3 and β₂ = 0.5 the path itself is unstable, here as with fp32 against fp64.
    """
    exact = movement("convolution", beta2, block_size=block_size, lr=1e-4)
    assert len(exact) == (4 if block_size is None else 2)
    found = movement(
        "convolution", beta2, block_size=block_size, lr=1e-4, matmul_dtype=torch.bfloat16
    )
    assert max(errors(found, exact)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("beta2", [0.003, 0.05, 0.5])
def test_factors_follow_fp32_under_the_spectral_norm(beta2):
    """The default norm, required: 2 %. At 0.5 a bound that is 1 % higher in bf16 is too much."""
    exact = reference("least squares", beta2, factor_norm="spectral")
    found = movement("least squares", beta2, factor_norm="spectral", matmul_dtype=torch.bfloat16)
    assert max(errors(found, exact)) < 0.02


def round_to_nearest_(Ks: list[Tensor]) -> None:
    for K in Ks:
        K.copy_(K.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("beta2", [0.003, 0.01])
def test_rounded_to_nearest_the_factors_would_freeze(beta2):
    """What the published implementation does. Steps are below half a unit of bf16 at one, 2⁻⁹."""
    found = movement("least squares", beta2, after_step=round_to_nearest_)
    assert max(errors(found, reference("least squares", beta2))) > 0.9


# The specification's table at full size, and at 0.5 the unit of bf16; measured here: below it.
STOCHASTIC = {0.003: 0.43, 0.01: 0.24, 0.05: 0.10, 0.2: 0.05, 0.5: 0.05}


@pytest.mark.slow
@pytest.mark.parametrize("beta2", RATES)
def test_stochastic_rounding_moves_the_factors(beta2):
    """bf16 factors: noise, but no freeze. Unbiased, so most of it is across the movement."""
    exact = reference("least squares", beta2)
    found = movement(
        "least squares", beta2, factor_dtype=torch.bfloat16, matmul_dtype=torch.bfloat16
    )
    assert max(errors(found, exact)) < 1.1 * STOCHASTIC[beta2]
    for a, b in zip(found, exact, strict=True):  # along it, the movement is right to a few per cent
        assert abs(1 - ((a * b).sum() / b.square().sum()).item()) < 0.05


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        (torch.float32, {"factor_dtype": torch.float64}),
        (torch.float32, {"matmul_dtype": torch.float64}),
        (torch.float32, {"matmul_dtype": torch.float64, "riemannian_momentum": 0.5}),
        (torch.float64, {"matmul_dtype": torch.float16}),
        (torch.float64, {"factor_dtype": torch.bfloat16, "matmul_dtype": torch.bfloat16}),
        (torch.bfloat16, {"matmul_dtype": torch.float64}),
        (torch.float32, {"factor_dtype": torch.bfloat16, "matmul_dtype": torch.float64}),
        (torch.float32, {"factor_dtype": torch.bfloat16, "matmul_dtype": torch.float16}),
    ],
    ids=str,
)
def test_any_pair_of_dtypes_moves_the_factors_alike(parameter, options):
    def final(**given: Any) -> list[Tensor]:
        W = nn.Parameter(torch.ones(6, 5, dtype=parameter))
        optimizer = rootfree.IFShampoo([W], batch_size=8, **{**PAPER, "precond_lr": 0.1, **given})
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            W.grad = torch.randn(6, 5, generator=generator).to(parameter)
            optimizer.step()
        return [K.double() for K in factors(optimizer, W)]

    exact = final(riemannian_momentum=options.get("riemannian_momentum", 0.0))
    start = torch.eye(6).double()
    assert (exact[0] - start).norm() > 0.1
    for a, b in zip(final(**options), exact, strict=True):
        # eight bits, rounded twenty times
        assert (a - b).norm() / b.norm() < 0.03


@pytest.mark.parametrize("name", ["RFRMSprop", "RFAdagrad", "RFAdamW"])
@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16], ids=str)
def test_state_of_diagonal_methods_may_be_wider_than_their_parameters(name, parameter):
    def final(dtype: torch.dtype | None) -> Tensor:
        p = nn.Parameter(torch.ones(6, 5, dtype=parameter))
        optimizer = getattr(rootfree, name)([p], batch_size=8, state_dtype=dtype)
        for seed in range(5):
            p.grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).to(parameter)
            optimizer.step()
        numbers = {key: t for key, t in optimizer.state[p].items() if key != "step"}
        assert {t.dtype for t in numbers.values()} == {dtype or torch.float32}
        return p.detach()

    assert torch.equal(final(torch.float64), final(None))  # computed in float32 all the same


def test_double_parameters_are_computed_in_double_throughout():
    def final(**options: Any) -> Tensor:
        W = nn.Parameter(torch.ones(6, 5, dtype=torch.float64))
        optimizer = rootfree.IFShampoo([W], lr=0.1, batch_size=8, **options)
        for t in range(5):
            W.grad = torch.sin(torch.arange(30.0).double() * (t + 1)).view(6, 5)
            optimizer.step()
        return W.detach()

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(final(matmul_dtype=dtype), final())
        if dtype != torch.float16:
            assert torch.equal(final(factor_dtype=dtype), final())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_of_products_is_used(dtype):
    """Half precision leaves its trace: the option is not ignored."""
    for make in (
        lambda W, **o: rootfree.IFShampoo([W], batch_size=8, structure="dense", **o),
        lambda W, **o: rootfree.IFFullAdagrad([W], batch_size=8, **o),
    ):
        results = []
        for given in (dtype, torch.float32):
            W = nn.Parameter(torch.ones(5))
            optimizer = make(W, matmul_dtype=given)
            W.grad = torch.linspace(0.1, 1, 5)
            optimizer.step()
            results.append(factors(optimizer, W)[0].clone())
        off = (results[0] - results[1]).norm() / results[1].norm()
        assert 0 < off < 0.01


# --- memory ------------------------------------------------------------------------------------


def state_bytes_per_parameter(**options: Any) -> float:
    """On the shapes of ViT-B/16; the meta device has shapes without memory."""
    ps = [nn.Parameter(torch.empty(shape, device="meta")) for shape in vit_b()]
    optimizer = rootfree.IFShampoo(ps, batch_size=1, **options)
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    return held / sum(p.numel() for p in ps)


def test_state_fits():
    """Measured: 12.2 bytes each by default, 6.1 in the low-memory mode."""
    assert 4 < state_bytes_per_parameter() < 14
    low = state_bytes_per_parameter(factor_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    assert 2 < low < 8
    # momentum alone is 2 bytes of it, and Riemannian momentum would not fit
    assert state_bytes_per_parameter(
        factor_dtype=torch.bfloat16, state_dtype=torch.bfloat16, riemannian_momentum=0.5
    ) > 8  # fmt: skip


# --- never a NaN -------------------------------------------------------------------------------

SHAPES = [(5,), (4, 6), (3, 2, 4)]
STRUCTURES = [
    {1: "dense", 2: ("dense", "lower_triangular"), 3: ("diagonal", "block_diagonal:2", "dense")},
    {
        1: "hierarchical:1",
        2: ("upper_triangular", "upper_toeplitz"),
        3: ("lower_toeplitz", "hierarchical:1", "upper_triangular"),
    },
]


STEADY = ("rank one", "tiny", "zero")


def extreme_gradients(
    shape: tuple[int, ...], t: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """One gradient of each kind that has broken an optimizer."""
    noise = torch.randn(shape, generator=generator)
    exponents = -30 + 34 * torch.rand(shape, generator=generator)  # 1e-30 ... 1e+4
    one = torch.ones(())
    for d in shape:
        one = one.unsqueeze(-1) * torch.linspace(1, 2, d)
    spike = torch.zeros(shape)
    spike.view(-1)[t % spike.numel()] = 1e4
    return {
        "every element of another size": noise.sign() * 10**exponents,
        "every step of another size": noise * 10 ** exponents.flatten()[0],
        "rank one": one,
        "huge, rank one": 1e4 * one,
        "tiny": 1e-30 * one,
        "zero": torch.zeros(shape),
        "zero and huge by turns": (1e4 if t % 2 else 0.0) * noise,
        "zero for long, then huge": (1e4 if t >= 250 else 0.0) * noise,
        "huge, then tiny": (1e4 if t < 50 else 1e-30) * noise,
        "a huge element that wanders": spike,
    }


@cache
def extremes(shape: tuple[int, ...]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [extreme_gradients(shape, t, generator) for t in range(300)]


def run_extremes(make: Callable[..., Any], kinds: tuple[str, ...] | None = None) -> None:
    """300 steps of every kind of gradient on tensors of one to three axes: all stays finite."""
    kinds = kinds or tuple(extremes(SHAPES[0])[0])
    ps = {(shape, kind): nn.Parameter(torch.ones(shape)) for shape in SHAPES for kind in kinds}
    optimizer = make(list(ps.values()))
    for t in range(300):
        for (shape, kind), p in ps.items():
            p.grad = extremes(shape)[t][kind]
        optimizer.step()
    bad = {
        f"{kind} {shape}: {key}"
        for (shape, kind), p in ps.items()
        for key, tensor in (("parameter", p), *optimizer.state[p].items())
        if not torch.isfinite(tensor).all()
    }
    assert not bad, sorted(bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structures", "factor_norm", "damping", "dtype"),
    [
        # not all 24: every pair of choices occurs, and fp16, of the least range, meets them all
        (0, "frobenius", 0.0, torch.float32),
        (1, "spectral", 0.0, torch.float32),
        (0, "spectral", 0.1, torch.bfloat16),
        (1, "frobenius", 0.1, torch.bfloat16),
        (0, "frobenius", 0.0, torch.float16),
        (0, "spectral", 0.1, torch.float16),
        (1, "frobenius", 0.1, torch.float16),
        (1, "spectral", 0.0, torch.float16),
    ],
)
def test_extreme_gradients_leave_everything_finite(structures, dtype, factor_norm, damping):
    """Factors, their momenta and, with the default cap on the update, the parameters."""
    run_extremes(
        lambda ps: rootfree.IFShampoo(
            ps,
            batch_size=1000,
            precond_lr=0.5,
            structure=STRUCTURES[structures],
            matmul_dtype=dtype,
            factor_norm=factor_norm,
            damping=damping,
            riemannian_momentum=0.5 if damping > 0 else 0.0,
            update_every=1,
            init_scale=1.0,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_extreme_gradients_leave_sums_of_curvature_finite(dtype):
    """γ = 0: tangent vectors may be as small as the square of a gradient."""
    run_extremes(
        lambda ps: rootfree.IFShampoo(
            ps, batch_size=1, gamma=0.0, damping=0.0, matmul_dtype=dtype, structure="dense"
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_a_norm_steady_gradients_leave_everything_finite(dtype):
    """The plain rule has no bound: nothing is promised for gradients that jump."""
    run_extremes(
        lambda ps: rootfree.IFShampoo(
            ps,
            batch_size=1,
            precond_lr=0.02,
            structure="dense",
            matmul_dtype=dtype,
            factor_norm=None,
            init_scale=1.0,
        ),
        kinds=STEADY,
    )


def test_extreme_gradients_without_a_cap_leave_everything_finite():
    run_extremes(
        lambda ps: rootfree.IFShampoo(
            ps, batch_size=1000, precond_lr=0.5, max_update_rms=None, init_scale=1.0, damping=0.0
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor_dtype", "update_rms"), [(None, None), (torch.bfloat16, 0.2)], ids=str
)
def test_extreme_gradients_with_the_defaults(factor_dtype, update_rms):
    """Also: a start from a first gradient of 1e-30."""
    run_extremes(
        lambda ps: rootfree.IFShampoo(
            ps, batch_size=1000, factor_dtype=factor_dtype, update_rms=update_rms
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (rootfree.RFFullAdagrad, {}),
        (rootfree.RFFullAdagrad, {"gamma": 1.0, "damping": 0.1}),
        (rootfree.RFShampoo, {}),
        (rootfree.RFShampoo, {"damping": 0.0}),
        (rootfree.IFFullAdagrad, {}),
        (rootfree.IFFullAdagrad, {"gamma": 1.0, "damping": 0.1}),
        (rootfree.IFFullAdagrad, {"form": "covariance"}),
        (rootfree.IFFullAdagrad, {"form": "covariance", "gamma": 1.0}),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_extreme_gradients_in_the_other_methods(make, options):
    """At their default rates. At 0.5 those that keep S or S⁻¹ itself leave fp32 in 300 steps."""
    run_extremes(lambda ps: make(ps, batch_size=1000, **options))
