"""Cutting parameters into blocks: nothing is lost, nothing counted twice, nothing too long."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rootfree.layout.tiles import Tile, axes_of, cut, tiles_of
from rootfree.structures import matricise, multiply_axis

quick = settings(max_examples=200)
sizes = st.sampled_from([1, 2, 3, 16, 64, 100, 128, 500, 512, 768, 1000, 1024, 4096, 8192])
lengths = st.integers(1, 60_000) | st.sampled_from([1000, 5632, 50257, 50304, 32000, 104729, 7919])


def pieces_of(runs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(start, size) of every piece."""
    return [(start + i * size, size) for start, count, size in runs for i in range(count)]


@quick
@given(d=lengths, block_size=sizes | st.integers(1, 5000))
@example(5632, 1024)
@example(1000, 512)
@example(50257, 1024)
@example(104729, 1)
@example(1, 1)
@example(65, 64)
@example(1025, 1024)
def test_pieces_cover_the_axis_once_and_fit(d, block_size):
    pieces = pieces_of(cut(d, block_size))
    assert pieces[0][0] == 0
    for (start, size), (following, _) in itertools.pairwise(pieces):
        assert start + size == following
    assert pieces[-1][0] + pieces[-1][1] == d
    assert all(1 <= size <= block_size for _, size in pieces)


@quick
@given(d=lengths, block_size=sizes | st.integers(1, 5000))
@example(50257, 1024)
@example(65, 64)
@example(4097, 64)
def test_pieces_are_nearly_equal_and_few(d, block_size):
    """They differ by one unit of 16 (one where blocks are small); the last may be short of it."""
    sizes = [size for _, size in pieces_of(cut(d, block_size))]
    unit = 16 if block_size >= 64 else 1
    assert max(sizes) - min(sizes[:-1], default=sizes[0]) <= unit
    assert max(sizes) - sizes[-1] < 2 * unit
    fewest = -(-d // block_size)
    assert len(sizes) <= 2 * fewest
    assert len(cut(d, block_size)) <= 3  # few kinds of blocks, so few batched calls


@quick
@given(d=lengths)
def test_without_a_block_size_an_axis_is_whole(d):
    assert cut(d, None) == [(0, 1, d)]
    assert cut(d, d) == [(0, 1, d)]


def test_convenient_sizes_come_out_equal():
    assert cut(3072, 1024) == [(0, 3, 1024)]
    assert cut(5632, 1024) == [(0, 8, 704)]
    assert cut(2304, 1024) == [(0, 3, 768)]
    assert cut(100, 30) == [(0, 4, 25)]
    assert cut(7, 3) == [(0, 1, 3), (3, 2, 2)]


# --- axes --------------------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 40), max_size=5).map(tuple)


@quick
@given(shape=shapes, limit=st.integers(1, 2000))
@example((512, 512, 3, 3), 1024)
@example((64, 3, 7, 7), 1024)
@example((1, 1, 1), 10)
@example((), 10)
def test_axes_keep_the_elements_and_the_first_axis(shape, limit):
    axes = axes_of(shape, merge_up_to=limit)
    squeezed = [d for d in shape if d != 1] or [1]
    assert math.prod(axes) == math.prod(shape)
    assert axes[0] == squeezed[0]  # outputs are never merged with inputs
    assert 1 not in axes or axes == (1,)
    # a merged axis stays within the limit; a longer one was like that before
    assert all(d <= limit or d in squeezed for d in axes)
    # nothing that could be merged is left: neighbours among the input axes do not fit together
    inputs = axes[1:]
    assert all(a * b > limit for a, b in itertools.pairwise(inputs))
    assert axes_of(shape, merge_up_to=None) == tuple(squeezed)


def test_a_matrix_stays_a_matrix():
    assert axes_of((2, 3), merge_up_to=1000) == (2, 3)
    assert axes_of((4, 1, 3), merge_up_to=1000) == (4, 3)
    assert axes_of((512, 512, 3, 3), merge_up_to=1024) == (512, 512, 9)
    assert axes_of((64, 3, 7, 7), merge_up_to=1024) == (64, 147)


# --- tiles -------------------------------------------------------------------------------------

small_axes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@quick
@given(axes=small_axes, data=st.data())
def test_tiles_partition_the_tensor(axes, data):
    block_sizes = [data.draw(st.none() | st.integers(1, 5)) for _ in axes]
    tiles = tiles_of(axes, block_sizes)
    tensor = torch.arange(math.prod(axes)).view(axes)
    seen = torch.zeros(math.prod(axes), dtype=torch.long)
    for tile in tiles:
        grid = tile.grid(tensor)
        assert grid.shape == (*tile.counts, *tile.sizes)
        assert tile.blocks == math.prod(tile.counts)
        assert grid.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        seen[grid.flatten()] += 1
        assert all(b is None or d <= b for d, b in zip(tile.sizes, block_sizes, strict=True))
        for index in torch.cartesian_prod(*map(torch.arange, tile.counts)).view(tile.blocks, -1):
            window = tensor
            for axis, (i, start, size) in enumerate(
                zip(index.tolist(), tile.starts, tile.sizes, strict=True)
            ):
                window = window.narrow(axis, start + i * size, size)
            assert torch.equal(grid[tuple(index)], window)
    assert (seen == 1).all()


def test_writing_through_the_grid_reaches_the_tensor_of_any_shape():
    tensor = torch.zeros(6, 1, 10)
    (tile,) = tiles_of((6, 10), (3, 5))
    tile.grid(tensor).fill_(2.0)
    assert (tensor == 2).all()
    stack = torch.arange(4 * 15.0).view(4, 3, 5)
    tile.grid(tensor).copy_(stack.view(*tile.counts, *tile.sizes))
    assert torch.equal(tensor[:3, 0, 5:], stack[1])
    assert torch.equal(tensor[3:, 0, :5], stack[2])


def test_a_layout_without_a_view_is_copied():
    channels_last = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    tile = Tile((4, 12), (0, 0), (1, 1), (4, 12))
    assert torch.equal(tile.grid(channels_last)[0, 0], channels_last.reshape(4, 12))


# --- products along axes -----------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(3,), (3, 4), (2, 3, 4), (2, 3, 2, 4)], ids=str)
def test_matricise_and_multiply_axis_are_einsums(dims):
    torch.manual_seed(0)
    G = torch.randn(5, *dims, dtype=torch.float64)
    letters = "ijkl"[: len(dims)]
    for n, d in enumerate(dims):
        A = torch.randn(5, 6, d, dtype=torch.float64)
        out = letters.replace(letters[n], "z")
        expected = torch.einsum(f"bz{letters[n]},b{letters}->b{out}", A, G)
        found = multiply_axis(G, n, lambda X, A=A: A @ X)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
        M = matricise(G, n)
        assert M.shape == (5, d, G[0].numel() // d)
        gram = torch.einsum(f"b{letters},b{out}->b{letters[n]}z", G, G)
        torch.testing.assert_close(M @ M.mT, gram, rtol=1e-14, atol=1e-13)
