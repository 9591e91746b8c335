"""Half precision: reductions run in fp32, FFTs too."""

from __future__ import annotations

import pytest
import torch

from rootfree.structures import make_structure

from .cases import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_squared_norm_of_halves_neither_overflows_nor_stalls(name: str):
    """300² > 65504, and a bf16 running sum of ones stops at 256."""
    s = make_structure(name, 600)
    ones = s.identity(1, dtype=torch.float16, device="cpu")
    assert float(s.squared_norm(300 * ones)) == 600 * 300.0**2
    assert float(s.squared_norm(ones.bfloat16())) == 600


@pytest.mark.parametrize("name", NAMES)
def test_diagonal_of_a_long_gram_does_not_stall(name: str):
    s = make_structure(name, 3)
    gram = s.unpack(s.project_gram(torch.ones(1, 3, 4096, dtype=torch.bfloat16)))
    assert gram.diagonal(dim1=1, dim2=2).tolist() == [[4096.0] * 3]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_results_are_rounded_once_where_the_operands_are_exact(name: str, dtype: torch.dtype):
    """Small integers are exact in every half type, so is what comes of them."""
    s = make_structure(name, 12)
    K = s.identity(1, dtype=dtype, device="cpu")
    s.add_to_diagonal_(K, 1.0)
    X = torch.arange(24, dtype=dtype).view(1, 12, 2)
    torch.testing.assert_close(s.apply(K, X), 2 * X, rtol=0, atol=1e-5)
    torch.testing.assert_close(s.unpack(s.product(K, K)), 4 * torch.eye(12, dtype=dtype)[None])
