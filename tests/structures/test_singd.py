"""Agreement with `singd`, the published implementation of the structures (an oracle only)."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from rootfree.structures import make_structure

pytest.importorskip("singd")
SIZES = [1, 5, 17, 40]


def _class(module: str, name: str) -> type:
    return getattr(import_module(f"singd.structures.{module}"), name)


def _block_diagonal(k: int) -> type:
    template = _class("blockdiagonal", "BlockDiagonalMatrixTemplate")
    return type("_Blocks", (template,), {"BLOCK_DIM": k})


def _hierarchical(k: int) -> type:
    template = _class("hierarchical", "HierarchicalMatrixTemplate")
    return type("_Hierarchical", (template,), {"MAX_K1": k, "MAX_K2": k})


def _triangular(corner: str) -> type:
    """1×1, then a column (lower) or row (upper), then the same again: d times, d at most 40."""
    dense = rest = _class("dense", "DenseMatrix")
    template = _class("recursive", f"Recursive{corner}MatrixTemplate")
    for _ in range(max(SIZES)):
        attributes = {"MAX_DIMS": (1, float("inf")), "CLS_A": dense, "CLS_C": rest}
        rest = type("_Triangular", (template,), attributes)
    return rest


PEERS = {
    "dense": lambda: _class("dense", "DenseMatrix"),
    "diagonal": lambda: _class("diagonal", "DiagonalMatrix"),
    "block_diagonal:3": lambda: _block_diagonal(3),
    "block_diagonal:30": lambda: _class("blockdiagonal", "Block30DiagonalMatrix"),
    "lower_triangular": lambda: _triangular("BottomLeft"),
    "upper_triangular": lambda: _triangular("TopRight"),
    "hierarchical:2": lambda: _hierarchical(2),
    "hierarchical:15": lambda: _class("hierarchical", "Hierarchical15_15Matrix"),
    "lower_toeplitz": lambda: _class("triltoeplitz", "TrilToeplitzMatrix"),
    "upper_toeplitz": lambda: _class("triutoeplitz", "TriuToeplitzMatrix"),
}


@pytest.fixture
def _singd_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """singd looks up in which dtype to compute, in a list that lacks float64."""
    for module in ("blockdiagonal", "hierarchical", "triltoeplitz", "triutoeplitz"):
        path = f"singd.structures.{module}.lowest_precision"
        monkeypatch.setattr(path, lambda *dtypes: torch.float64, raising=False)


@pytest.mark.usefixtures("_singd_in_float64")
@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.filterwarnings("ignore")  # singd warns where it computes densely
def test_agrees_with_singd(name: str, d: int):
    ours, theirs = make_structure(name, d), PEERS[name]()
    generator = torch.Generator().manual_seed(d)
    A, B = torch.randn(2, d, d, dtype=torch.float64, generator=generator) / d**0.5
    X = torch.randn(d, 4, dtype=torch.float64, generator=generator)
    H = A + A.T
    their_K, their_M = theirs.from_dense(H), theirs.from_dense(B + B.T)
    K, M = (ours.pack(matrix.to_dense()[None]) for matrix in (their_K, their_M))

    def assert_same(packed: torch.Tensor, matrix: object) -> None:
        torch.testing.assert_close(
            ours.unpack(packed)[0], matrix.to_dense(), rtol=1e-11, atol=1e-11
        )

    assert_same(ours.project(H[None]), their_K)
    assert_same(ours.project_factor_gram(K), their_K.from_inner())
    assert_same(ours.project_gram(ours.apply_transposed(K, X[None])), their_K.from_inner(X))
    assert_same(ours.product(K, M), their_K @ their_M)
    assert_same(
        ours.add_to_diagonal_(K.clone(), -0.5), theirs.from_dense(H.clone()).diag_add_(-0.5)
    )
    torch.testing.assert_close(ours.apply(K, X[None])[0], their_K @ X)
    torch.testing.assert_close(ours.apply_transposed(K, X[None])[0], their_K.rmatmat(X))
    torch.testing.assert_close(ours.squared_norm(K)[0], their_K.frobenius_norm() ** 2)
