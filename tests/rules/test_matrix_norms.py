"""The norm that bounds a factor's step: near the spectral norm, and never below it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rootfree.structures import make_structure
from rules.matrix_runs import STRUCTURES, difference
from rules.test_matrix_oracles import BALANCED, INVERSE_FREE_BALANCED

# --- in training -------------------------------------------------------------------------------


def steady_gradients(shape: tuple[int, int], steps: int) -> list[np.ndarray]:
    """Gradients with one uneven covariance all along, as training has them."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(d, d)))[0] * 0.6 ** np.arange(d) for d in shape)
    return [0.5 * left @ rng.normal(size=shape) @ right.T for _ in range(steps)]


SPECTRAL = {
    **BALANCED,
    **INVERSE_FREE_BALANCED,
    "gamma": 1.0,
    "init_scale": 1.0,
    "factor_norm": "spectral",
}


def off(structure: str, norm: str) -> float:
    """Of the library with the spectral norm from the oracle with the exact `norm`, in 30 steps."""
    return difference(
        "IFShampoo",
        {**SPECTRAL, "structure": structure},
        shape=(8, 6),
        given=steady_gradients((8, 6), 30),
        oracle_options={"factor_norm": norm},
    )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_exact_spectral_norm_is_followed_within_a_few_per_cent(structure):
    """The bound is a little above ‖m‖₂ where singular values are close; measured: at most 3 %."""
    assert off(structure, "spectral") < (1e-12 if structure == "diagonal" else 0.04)


@pytest.mark.parametrize("structure", ["dense", "lower_triangular", "upper_triangular"])
def test_the_frobenius_norm_is_another_method(structure):
    assert off(structure, "frobenius") > 3 * off(structure, "spectral")


# --- the bound ---------------------------------------------------------------------------------


def adversarial(kind: str, d: int, seed: int) -> Tensor:
    """A tangent vector (dense, symmetric, (1, d, d)) whose norm is easily missed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(d, 1, dtype=torch.float64, generator=generator)
    if kind == "rank one":
        return (x @ x.T)[None]
    if kind == "spike":  # far from the direction of everything else
        first = torch.zeros(d, 1, dtype=torch.float64)
        first[0] = 1.0
        x[0] = 0.0
        return (x @ x.T + 0.3 * first @ first.T)[None]
    if kind == "blocks":  # all of the norm in one half
        scale = torch.where(torch.arange(d) < d // 2, 1e-3, 1.0).double()
        return (torch.outer(scale, scale) * (x @ x.T))[None]
    if kind == "corner":
        m = torch.zeros(1, d, d, dtype=torch.float64)
        m[0, 0, -1] = m[0, -1, 0] = 1.0
        return m
    if kind == "flat":  # all singular values equal: furthest from the Frobenius norm
        return torch.eye(d, dtype=torch.float64)[None]
    if kind == "zero":
        return torch.zeros(1, d, d, dtype=torch.float64)
    noise = torch.randn(d, d, dtype=torch.float64, generator=generator)
    return (noise + noise.T)[None]


KINDS = ["rank one", "spike", "blocks", "corner", "flat", "zero", "noise"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def looseness(name: str, d: int) -> float:
    """How far above ‖m‖₂ the bound may be: d^⅛ of the Schatten-8 norm, √2 of the two parts of a
    hierarchical matrix; Toeplitz matrices are bounded by their symbol, which √d bounds in turn."""
    if name == "diagonal":
        return 1.0
    kind = name.partition(":")[0]
    if kind.endswith("toeplitz"):
        return d**0.5
    return (2**0.5 if kind == "hierarchical" else 1.0) * d**0.125


@settings(max_examples=80)
@given(
    kind=st.sampled_from(KINDS),
    d=st.sampled_from([1, 2, 3, 5, 16, 33]),
    size=st.sampled_from([1e-38, 1e-30, 1e-12, 1.0, 1e6, 1e15]),
    beta2=st.floats(1e-3, 0.999),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@example("spike", 33, 1.0, 0.999, torch.bfloat16, 0)
@example("spike", 33, 1e15, 0.999, torch.float16, 0)
@example("flat", 33, 1.0, 0.999, torch.bfloat16, 0)
@example("noise", 5, 1e-30, 0.5, torch.float16, 0)
def check_bound(name, kind, d, size, beta2, dtype, seed) -> None:
    structure = make_structure(name, d)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    m = structure.project(size * adversarial(kind, d, seed)).to(wide).contiguous()
    exact = torch.linalg.matrix_norm(structure.unpack(m.double()), 2).item()
    bound = structure.spectral_bound(m, dtype=dtype)
    assert bound.shape == (1,)
    assert torch.isfinite(bound).all()
    # what the factor's step is divided by
    assert beta2 * exact / max(1.0, bound.item()) < 1
    if exact > 1e-6:  # below, the step is not divided at all
        slack = 1 + 8 * torch.finfo(dtype).eps
        assert exact / slack <= bound.item() <= exact * looseness(name, d) * slack * 1.09


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_step_never_reaches_the_singular_matrices(name):
    """β₂‖m‖₂/max(1, bound) < 1 whatever m is."""
    check_bound(name)


@pytest.mark.parametrize("name", STRUCTURES)
def test_each_of_a_stack_has_its_own_bound(name):
    structure = make_structure(name, 6)
    X = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    m = structure.project_gram(X)
    together = structure.spectral_bound(m, dtype=torch.float64)
    alone = [structure.spectral_bound(each[None], dtype=torch.float64)[0] for each in m]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-13, atol=0)
    norms = structure.squared_norm(m).sqrt()
    dense = torch.linalg.matrix_norm(structure.unpack(m))
    torch.testing.assert_close(norms, dense, rtol=1e-13, atol=0)
