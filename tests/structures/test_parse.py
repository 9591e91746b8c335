"""make_structure: names, sizes and messages."""

from __future__ import annotations

import re

import pytest

from rootfree.structures import BlockDiagonal, Dense, Hierarchical, make_structure

from .cases import NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("d", [1, 7, 200])
def test_name_is_canonical(name: str, d: int):
    structure = make_structure(name, d)
    assert structure.d == d
    assert make_structure(structure.name, d) == structure
    assert hash(make_structure(structure.name, d)) == hash(structure)


def test_size_beyond_the_axis_is_the_axis():
    assert make_structure("block_diagonal:64", 10) == BlockDiagonal(10, 10)
    assert make_structure("hierarchical:64", 10).name == "hierarchical:10"


def test_hierarchical_spends_k_on_each_border():
    assert make_structure("hierarchical:3", 10) == Hierarchical(10, 3)
    # 3 rows of 10, 4 of the diagonal, 3 rows of 7
    assert Hierarchical(10, 3).packed_shape == (3 * 10 + 4 + 3 * 7,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo", "structure must be one of dense, diagonal, block_diagonal:<k>, lower_triangular, "),
        ("foo", "; got 'foo'"),
        ("Diagonal", "got 'Diagonal'; did you mean diagonal?"),
        ("block_diag:32", "got 'block_diag:32'; did you mean block_diagonal:<k>?"),
        ("toeplitz", "did you mean"),
        ("", "got ''"),
        ("block_diagonal", "block_diagonal:<k> needs an integer k >= 1, got 'block_diagonal'"),
        ("hierarchical:0", "hierarchical:<k> needs an integer k >= 1, got 'hierarchical:0'"),
        ("hierarchical:-3", "got 'hierarchical:-3'"),
        ("hierarchical:2.5", "got 'hierarchical:2.5'"),
        ("hierarchical:2:3", "got 'hierarchical:2:3'"),
        ("block_diagonal:", "got 'block_diagonal:'"),
        ("dense:3", "structure dense takes no size, got 'dense:3'"),
    ],
)
def test_errors_say_what_is_allowed(text: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_structure(text, 8)


def test_axis_and_size_must_be_positive():
    with pytest.raises(ValueError, match="d must be at least 1, got 0"):
        Dense(0)
    with pytest.raises(ValueError, match="k of block_diagonal must be at least 1, got 0"):
        BlockDiagonal(4, 0)
