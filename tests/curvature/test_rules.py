"""Every rule with every form of curvature, against oracles that see H as a dense matrix."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from curvature.given import KINDS
from curvature.runs import ALL_METHODS, BALANCED, PieceOfSizeOneError, difference
from rules.matrix_runs import AGREES, STRUCTURES

MATRIX_METHODS = [name for name in ALL_METHODS if name not in ("RFRMSprop", "RFAdagrad", "RFAdamW")]


# With at most one axis all forms of Kronecker products are a matrix or a diagonal.
SIMPLE_KINDS = ("outer", "diagonal", "kronecker", "kronecker-diagonals")


def kinds_and_shapes(*shapes: tuple[int, ...]) -> pytest.MarkDecorator:
    """Every kind of curvature on these shapes, once each."""
    cases = [
        (kind, shape) for shape in shapes for kind in (KINDS if len(shape) > 1 else SIMPLE_KINDS)
    ]
    return pytest.mark.parametrize(("kind", "shape"), cases, ids=str)


@kinds_and_shapes((), (5,), (3, 1, 4))
@pytest.mark.parametrize("method", ALL_METHODS)
def test_any_number_of_axes(method, kind, shape):
    assert difference(method, kind, BALANCED[method], shape=shape) < AGREES


@kinds_and_shapes((5,), (4, 5))
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure(structure, kind, shape):
    options = {**BALANCED["IFShampoo"], "structure": structure}
    assert difference("IFShampoo", kind, options, shape=shape) < AGREES


# Axes are merged up to the block size and cut beyond it, in unequal pieces; blocks of the full
# matrix begin and end in the middle of a row.
@kinds_and_shapes((7,), (5, 2, 7), (4, 4, 2, 3))
@pytest.mark.parametrize("method", MATRIX_METHODS)
def test_blocks_see_their_part_of_the_curvature(method, kind, shape):
    options = {**BALANCED[method], "block_size": 6 if len(shape) > 3 else 4}
    assert difference(method, kind, options, shape=shape, steps=3) < AGREES


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_structured_blocks(structure, kind):
    options = {**BALANCED["IFShampoo"], "block_size": 4, "structure": structure}
    assert difference("IFShampoo", kind, options, shape=(4, 6, 3), steps=3) < AGREES


@kinds_and_shapes((5,), (2, 3, 4))
def test_start_from_the_trace(kind, shape):
    options = {**BALANCED["IFShampoo"], "init_scale": "gradient"}
    assert difference("IFShampoo", kind, options, shape=shape, scale=0.02) < AGREES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", MATRIX_METHODS)
def test_without_damping_and_between_refreshes(method, kind):
    options = {**BALANCED[method], "damping": 0.0, "gamma": 0.0, "update_every": 2}
    assert difference(method, kind, options, shape=(3, 4)) < AGREES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_one_per_cent_more_curvature_is_seen(method, kind):
    options = {**BALANCED[method], "momentum": 0.0} if method != "RFAdamW" else BALANCED[method]
    assert difference(method, kind, options, shape=(2, 3, 4), skew=1.01) > 1e6 * AGREES


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    method=st.sampled_from(MATRIX_METHODS),
    shape=st.lists(st.integers(2, 5), min_size=1, max_size=4).map(tuple),
    block_size=st.sampled_from([None, 2, 4, 6, 1024]),
    structure=st.sampled_from(STRUCTURES),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_cut(kind, method, shape, block_size, structure, seed):
    options = {**BALANCED[method], "block_size": block_size}
    if method == "IFShampoo":
        options["structure"] = structure
    try:
        off = difference(method, kind, options, shape=shape, steps=2, seed=seed)
    except PieceOfSizeOneError:
        assume(False)
    assert off < AGREES
