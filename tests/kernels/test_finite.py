"""The look at gradients: one number that is not finite is found wherever it is."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.devices import DEVICE, normal, unaligned
from rootfree.kernels import finite
from rootfree.kernels.finite import FiniteLook

CHUNK = finite._CHUNK
# One number, a part of a block, a chunk and one number more, several chunks.
SIZES = [(1,), (3, 5), (CHUNK + 1,), (2, CHUNK + 7)]


@pytest.mark.parametrize("dtype", sorted(finite.DTYPES, key=str))
def test_every_place_is_looked_at(dtype):
    look, largest = FiniteLook(), torch.finfo(dtype).max
    gs = [normal(*shape, dtype=dtype) for shape in SIZES]
    gs[0][0], gs[3][0, 0] = largest, -largest
    assert look(gs).item() == 0
    for which, place in ((0, 0), (1, 14), (2, CHUNK - 1), (2, CHUNK), (3, 2 * CHUNK + 13)):
        for bad in (math.nan, math.inf, -math.inf):
            flat = gs[which].view(-1)
            kept, flat[place] = flat[place].clone(), bad
            assert look(gs).item() == 1
            flat[place] = kept
    assert look(gs).item() == 0


def test_layouts_and_dtypes_of_all_kinds():
    look = FiniteLook()
    dense = normal(3, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    sparse = normal(8, 9)[:, ::2]
    gs = [dense, sparse, unaligned(normal(77)), normal(40, dtype=torch.bfloat16)]
    assert look(gs).item() == 0
    for g in gs:
        kept = g[-1].clone()
        g[-1] = math.nan
        assert look(gs).item() == 1
        g[-1] = kept
    # What lies between the elements is not the gradient's.
    hidden = torch.full((8, 9), math.nan, device=DEVICE)
    hidden[:, ::2] = 1.0
    assert look([hidden[:, ::2]]).item() == 0


def test_lists_that_come_again_share_tables():
    look = FiniteLook()
    for count in range(1, 2 * finite._MOST):
        assert look([normal(count)]).item() == 0
    assert len(look._lists) == finite._MOST
    kept = dict(look._lists)
    assert look([normal(2 * finite._MOST - 1)]).item() == 0
    assert look._lists == kept
