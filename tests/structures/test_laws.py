"""The laws stated in `rootfree.structures.base`, for every structure, against dense float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rootfree.structures
from rootfree.structures import Structure

from .cases import CASES, EXACT_CASES, NAMES, Case
from .patterns import PATTERNS
from .tolerance import assert_near

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_exact_case = pytest.mark.parametrize("case", EXACT_CASES, ids=str)


def test_every_structure_has_an_oracle_and_a_case():
    exported = [getattr(rootfree.structures, name) for name in rootfree.structures.__all__]
    kinds = {cls.kind for cls in exported if isinstance(cls, type) and cls is not Structure}
    assert kinds == set(PATTERNS) == {name.partition(":")[0] for name in NAMES}


@every_case
def test_packing_loses_nothing(case: Case):
    K = case.K
    assert K.shape == (case.b, *case.structure.packed_shape)
    assert K.dtype == case.dtype
    assert torch.equal(case.structure.unpack(K).double(), case.K_dense)
    assert torch.equal(case.structure.pack(case.structure.unpack(K)), K)


@every_case
def test_identity(case: Case):
    one = case.structure.identity(case.b, dtype=case.dtype, device="cpu")
    eye = torch.eye(case.d, dtype=case.dtype).expand(case.b, -1, -1)
    assert torch.equal(case.structure.unpack(one), eye)
    assert torch.equal(one, case.structure.pack(eye))
    for same in (case.structure.product(one, case.K), case.structure.product(case.K, one)):
        assert same.dtype == case.dtype
        expected, magnitude = case.K.double(), case.K_dense.abs()
        assert_near(same, expected, terms=case.d, magnitude=magnitude)


@every_case
def test_apply(case: Case):
    K, X = case.K_dense, case.X_dense
    for actual, dense in [
        (case.structure.apply(case.K, case.X), K),
        (case.structure.apply_transposed(case.K, case.X), K.mT),
    ]:
        assert actual.dtype == case.dtype
        assert_near(actual, dense @ X, terms=case.d, magnitude=dense.abs() @ X.abs())


@every_case
def test_apply_symmetric(case: Case):
    """With fewer columns than rows, and with more."""
    K = case.K_dense
    for repeats in (1, 3):
        X, X_dense = case.X.repeat(1, 1, repeats), case.X_dense.repeat(1, 1, repeats)
        actual = case.structure.apply_symmetric(case.K, X)
        assert actual.dtype == case.dtype
        magnitude = K.abs() @ K.mT.abs() @ X_dense.abs()
        assert_near(actual, K @ K.mT @ X_dense, terms=2 * case.d, magnitude=magnitude)


@every_case
def test_product_stays_in_the_structure(case: Case):
    K, M = case.K_dense, case.M_dense
    packed = case.structure.product(case.K, case.M)
    assert packed.shape == case.K.shape
    assert packed.dtype == case.dtype
    # K M is compared as a dense matrix: were it outside the structure, no packed form would do
    product = case.structure.unpack(packed)
    assert_near(product, K @ M, terms=case.d, magnitude=K.abs() @ M.abs())


@every_case
def test_project_gram(case: Case):
    X = case.X_dense
    packed = case.structure.project_gram(case.X)
    assert packed.shape == case.K.shape
    assert packed.dtype == case.dtype
    expected = case.oracle.projection(X @ X.mT)
    magnitude = case.oracle.projection(X.abs() @ X.abs().mT)
    assert_near(case.structure.unpack(packed), expected, terms=case.d, magnitude=magnitude)


@every_case
def test_project_factor_gram(case: Case):
    K = case.K_dense
    packed = case.structure.project_factor_gram(case.K)
    assert packed.shape == case.K.shape
    assert packed.dtype == case.dtype
    expected = case.oracle.projection(K.mT @ K)
    magnitude = case.oracle.projection(K.mT.abs() @ K.abs())
    assert_near(case.structure.unpack(packed), expected, terms=case.d, magnitude=magnitude)


@every_case
def test_project_congruence(case: Case):
    K = case.K_dense
    X = case.X_dense / case.d**0.5
    U = (X @ X.mT - 0.5 * torch.eye(case.d, dtype=torch.float64)).to(case.dtype)  # of any sign
    diagonal = U.diagonal(dim1=1, dim2=2)
    for given_U, dense in ((U, U.double()), (diagonal, diagonal.double().diag_embed())):
        packed = case.structure.project_congruence(case.K, given_U)
        assert packed.shape == case.K.shape
        assert packed.dtype == case.dtype
        expected = case.oracle.projection(K.mT @ dense @ K)
        magnitude = case.oracle.projection(K.mT.abs() @ dense.abs() @ K.abs())
        actual = case.structure.unpack(packed)
        assert_near(actual, expected, terms=2 * case.d, magnitude=magnitude)
        # and the projection keeps the trace
        trace = (K * (dense @ K)).sum((1, 2))
        size = (K.abs() * (dense.abs() @ K.abs())).sum((1, 2))
        actual = case.structure.trace(packed).to(case.dtype)
        assert_near(actual, trace, terms=case.d, magnitude=size)


@every_case
def test_rows_and_trace(case: Case):
    K = case.K_dense
    rows, trace = case.structure.squared_rows(case.K), case.structure.trace(case.K)
    assert rows.dtype == trace.dtype == case.structure.squared_norm(case.K).dtype
    expected = K.square().sum(2)
    assert_near(rows, expected, terms=case.d, magnitude=expected)
    diagonal = K.diagonal(dim1=1, dim2=2)
    assert_near(trace, diagonal.sum(1), terms=case.d, magnitude=diagonal.abs().sum(1))


@every_case
def test_project(case: Case):
    M = case.X_dense @ case.X_dense.mT
    M = M.to(case.dtype)
    packed = case.structure.project(M)
    assert packed.shape == case.K.shape
    assert packed.dtype == case.dtype
    actual, expected = case.structure.unpack(packed), case.oracle.projection(M)
    assert_near(actual, expected, terms=case.d, magnitude=case.oracle.projection(M.abs()))


@every_exact_case
def test_projection_is_orthogonal_in_the_symmetric_parts(case: Case):
    """⟨M - sym(Π(M)), sym(n)⟩ = 0 for all n in the structure, and Π(M) does not rotate."""
    M = case.X_dense @ case.X_dense.mT
    tangent = case.structure.unpack(case.structure.project(M))
    residual = M - (tangent + tangent.mT) / 2
    n = case.M_dense
    along = (residual * (n + n.mT)).sum((1, 2))
    size = M.norm() * n.norm()
    assert_near(along, torch.zeros_like(along), terms=case.d, magnitude=size)
    # the rotations of the structure: where an entry and its mirror image are both in it
    inside = case.oracle.index < len(case.oracle.groups)
    rotation = torch.where(inside & inside.mT, n - n.mT, 0)
    turned = (tangent * rotation).sum((1, 2))
    assert_near(turned, torch.zeros_like(turned), terms=case.d, magnitude=size)


@pytest.mark.parametrize("case", [c for c in EXACT_CASES if c.d <= 8], ids=str)
def test_projection_solves_the_least_squares_problem(case: Case):
    """Π(M) is the least-norm m in the structure that minimises ‖M - sym(m)‖."""
    M = case.X_dense @ case.X_dense.mT
    basis = case.oracle.basis()
    design = ((basis + basis.mT) / 2).flatten(1).mT  # numbers -> sym(m)
    numbers = torch.linalg.pinv(design) @ M.flatten(1).mT
    expected = (basis.flatten(1).mT @ numbers).mT.reshape(M.shape)
    actual = case.structure.unpack(case.structure.project(M))
    # d² terms: pinv works on the d²×d² design matrix
    assert_near(actual, expected, terms=case.d**2, magnitude=M.norm())


@every_case
def test_squared_norm(case: Case):
    actual = case.structure.squared_norm(case.K)
    expected = case.K_dense.square().sum((1, 2))
    assert actual.dtype == (torch.float32 if case.dtype == torch.bfloat16 else case.dtype)
    assert_near(actual, expected, terms=case.d, magnitude=expected)


@every_case
def test_add_to_diagonal(case: Case):
    M = case.K.clone()
    assert case.structure.add_to_diagonal_(M, -0.75) is M
    expected = case.K_dense - 0.75 * torch.eye(case.d, dtype=torch.float64)
    assert_near(case.structure.unpack(M), expected, terms=0, magnitude=expected.abs())
    # entries of M that are no entries of the dense matrix (padding) did not move
    norm = case.structure.squared_norm(M)
    rounded = case.structure.unpack(M).double().square().sum((1, 2))
    assert_near(norm, rounded, terms=case.d, magnitude=rounded)


def _run_everything(case: Case, K: torch.Tensor, M: torch.Tensor, X: torch.Tensor) -> None:
    s = case.structure
    s.identity(case.b, dtype=K.dtype, device=K.device)
    s.unpack(s.product(K, M))
    s.apply(K, s.apply_transposed(K, X))
    s.apply_symmetric(K, X)
    s.project_gram(X)
    s.project_factor_gram(K)
    s.project(X @ X.mT)
    s.squared_norm(K)
    s.squared_rows(K)
    s.trace(M)
    s.project_congruence(K, X @ X.mT)
    s.project_congruence(K, X[:, :, 0])


@pytest.mark.parametrize("case", [c for c in CASES if c.d != 5], ids=str)
def test_arguments_are_left_alone(case: Case):
    K, M, X = case.K.clone(), case.M.clone(), case.X.clone()
    _run_everything(case, K, M, X)
    assert torch.equal(K, case.K)
    assert torch.equal(M, case.M)
    assert torch.equal(X, case.X)


@pytest.mark.parametrize("case", [c for c in CASES if c.d != 5], ids=str)
def test_nothing_waits_for_the_device(case: Case):
    """Meta tensors have no values: a read of one on the host (item, tolist, bool) would raise."""
    K, M, X = (t.to("meta") for t in (case.K, case.M, case.X))
    _run_everything(case, K, M, X)
    case.structure.add_to_diagonal_(M, 1.0)


@pytest.mark.parametrize("case", [c for c in EXACT_CASES if c.d == 17], ids=str)
def test_strides_do_not_matter(case: Case):
    s, K, X = case.structure, case.K, case.X
    strided = X.mT.contiguous().mT
    for function in (lambda X: s.apply(K, X), lambda X: s.apply_transposed(K, X), s.project_gram):
        actual, expected = function(strided), function(X)
        assert_near(actual, expected, terms=case.d, magnitude=expected.abs())


LAWS = [
    test_packing_loses_nothing,
    test_identity,
    test_apply,
    test_apply_symmetric,
    test_product_stays_in_the_structure,
    test_project_gram,
    test_project_factor_gram,
    test_project_congruence,
    test_rows_and_trace,
    test_project,
    test_projection_is_orthogonal_in_the_symmetric_parts,
    test_squared_norm,
    test_add_to_diagonal,
    test_arguments_are_left_alone,
]


# k for an axis of size d, of the structures that have one.
SIZED = ("block_diagonal", "hierarchical")
RELATIONS = {
    "k<d": lambda d: st.integers(1, max(d - 1, 1)),
    "k=d": st.just,
    "k>d": lambda d: st.integers(d + 1, 100),
}


@pytest.mark.parametrize(
    ("kind", "relation"),
    [
        *((kind, None) for kind in sorted(PATTERNS) if kind not in SIZED),
        *itertools.product(SIZED, RELATIONS),
    ],
)
@settings(max_examples=12)
@given(data=st.data(), d=st.integers(1, 64), b=st.integers(1, 5))
def test_any_size(kind: str, relation: str | None, data: st.DataObject, d: int, b: int):
    name = kind if relation is None else f"{kind}:{data.draw(RELATIONS[relation](d), label='k')}"
    for law in LAWS:
        law(Case(name, d, b, torch.float64))


@pytest.mark.parametrize("kind", SIZED)
@pytest.mark.parametrize(("d", "k", "b"), [(12, 4, 1), (13, 4, 2), (7, 1, 1), (64, 64, 1)])
def test_telling_sizes(kind: str, d: int, k: int, b: int):
    """k divides d, leaves one element over, is one; the largest block; one block and two."""
    for law in LAWS:
        law(Case(f"{kind}:{k}", d, b, torch.float64))
