"""Kronecker factors over one view, seen from another: regrouping, and restriction to blocks."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from curvature.given import dense
from rootfree import KroneckerCurvature
from rootfree.curvature.kronecker import FactorStack, KroneckerStack
from rootfree.curvature.regrouping import regroup
from rootfree.curvature.stacking import parts_of
from rootfree.layout.tiles import Tile, tiles_of

primes = st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=4)
cuts = st.lists(st.booleans(), min_size=3, max_size=3)


def merged(primes: list[int], keep: list[bool]) -> tuple[int, ...]:
    """A factorisation of the product: neighbours are merged where `keep` says no."""
    axes = [primes[0]]
    for d, cut in zip(primes[1:], keep, strict=False):
        if cut:
            axes.append(d)
        else:
            axes[-1] *= d
    return tuple(axes)


@given(primes=primes, left=cuts, order=st.randoms(), right=cuts, ones=st.integers(0, 3))
def test_groups_cover_both_and_have_equal_products(primes, left, order, right, ones):
    view = merged(primes, left)
    order.shuffle(primes)  # so that the two need not have a common refinement
    axes = list(merged(primes, right))
    for _ in range(ones):
        axes.insert(order.randint(0, len(axes)), 1)
    groups = regroup(view, tuple(axes))
    assert [n for ns, _ in groups for n in ns] == list(range(len(view)))
    assert [m for _, ms in groups for m in ms] == list(range(len(axes)))
    for ns, ms in groups:
        assert len(ns) > 0
        assert len(ms) > 0
        assert math.prod(view[n] for n in ns) == math.prod(axes[m] for m in ms)
    # as many as possible: every place where the running products meet is a cut
    ours = {math.prod(view[: i + 1]) for i in range(len(view))}
    theirs = {math.prod(axes[: j + 1]) for j in range(len(axes))}
    assert len(groups) == len((ours & theirs) - {1}) or math.prod(view) == 1


def test_regrouping_by_example():
    def sizes(view, axes):
        groups = regroup(view, tuple(axes))
        return [([view[n] for n in ns], [axes[m] for m in ms]) for ns, ms in groups]

    # a convolution that is preconditioned per axis, with the factors of KFAC
    assert sizes((64, 32, 9), (64, 288)) == [([64], [64]), ([32, 9], [288])]
    assert sizes((64, 288), (64, 32, 9)) == [([64], [64]), ([288], [32, 9])]
    assert sizes((6,), (2, 3)) == [([6], [2, 3])]
    assert sizes((2, 3), (3, 2)) == [([2, 3], [3, 2])]
    assert sizes((2, 3), (1, 2, 1, 3, 1)) == [([2], [1, 2, 1]), ([3], [3, 1])]
    assert sizes((1,), (1, 1)) == [([1], [1, 1])]


@given(
    primes=primes,
    left=cuts,
    right=cuts,
    size=st.sampled_from([None, 2, 3, 5]),
    diagonal=st.lists(st.booleans(), min_size=4, max_size=4),
    rows=st.sampled_from([None, (0, 1), (1, 0)]),
    seed=st.integers(0, 2**31),
)
def test_blocks_of_the_parts_are_blocks_of_the_matrix(
    primes, left, right, size, diagonal, rows, seed
):
    """Of two matrices: the rows of a stack, or (None) each with factors of its own."""
    view, axes = merged(primes, left), merged(primes[::-1], right)
    generator = torch.Generator().manual_seed(seed)
    factors = []
    for d, flat in zip(axes, diagonal, strict=False):
        U = torch.randn(2, d, d, dtype=torch.float64, generator=generator)
        U = U[:, 0].square() if flat else U @ U.mT
        factors.append(U)
    if rows is None:
        Hs = [KroneckerCurvature(tuple(U[k].clone() for U in factors), axes) for k in range(2)]
    else:
        stack = KroneckerStack([FactorStack(U) for U in factors])
        Hs = [stack.row(k) for k in rows]
    matrices = [dense(H) for H in Hs]
    places = np.arange(math.prod(view)).reshape(view)
    for tile in tiles_of(view, [size] * len(view)):
        parts = parts_of(Hs, tile, dtype=torch.float64)
        for part in parts:
            largest = part.U.abs().flatten(1).amax(1)
            assert part.largest is None or torch.equal(part.largest, largest)
        for (k, matrix), (block, corner) in product(enumerate(matrices), enumerate(_corners(tile))):
            box = tuple(slice(c, c + d) for c, d in zip(corner, tile.sizes, strict=True))
            flat = places[box].reshape(-1)
            expected = np.eye(1)
            for part in parts:
                U = part.U[k * tile.blocks + block].numpy()
                expected = np.kron(expected, np.diag(U) if part.is_diagonal else U)
            np.testing.assert_allclose(expected, matrix[np.ix_(flat, flat)], rtol=1e-13)


def _corners(tile: Tile) -> list[list[int]]:
    return [
        [s + c * d for s, c, d in zip(tile.starts, count, tile.sizes, strict=True)]
        for count in np.ndindex(*tile.counts)
    ]


def test_a_diagonal_factor_of_a_vocabulary_stays_a_vector():
    H = KroneckerCurvature((torch.ones(50_000), torch.eye(4)), (50_000, 4))
    (tile,) = tiles_of((50_000, 4), [None, None])
    assert [part.U.shape for part in parts_of([H], tile, dtype=torch.float32)] == [
        (1, 50_000),
        (1, 4, 4),
    ]
