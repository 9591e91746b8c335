"""The rate of a factor goes by how much one gradient can say about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rootfree
from conformance.curvatures import FromGradients
from rootfree.rules.if_shampoo import rates_by_rank
from rootfree.structures import make_structure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: (structure of each axis with its length, rate of each axis at β₂ = 0.6)
CASES = [
    ([("dense", 2), ("dense", 30)], [0.6, 0.04]),
    ([("dense", 8), ("dense", 8)], [0.6, 0.6]),
    ([("dense", 2), ("dense", 3), ("dense", 12)], [0.6, 0.6, 0.3]),
    ([("diagonal", 50), ("dense", 4)], [0.6, 0.6]),
    ([("dense", 1), ("block_diagonal:4", 12)], [0.6, 0.15]),
    ([("diagonal", 7)], [0.6]),
]


@pytest.mark.parametrize(("axes", "expected"), CASES, ids=str)
def test_rates(axes, expected):
    structures = [make_structure(name, d) for name, d in axes]
    assert rates_by_rank(0.6, structures) == pytest.approx(expected)


def moved(method, *, by_rank, **options):
    """How far the factors of a 2x6 matrix went from the identity in one refresh."""
    p = nn.Parameter(torch.zeros(2, 6, dtype=torch.float64))
    words = {"batch_size": 3, "precond_lr": 0.01, "damping": 0.1, **options}
    optimizer = method([p], rate_by_rank=by_rank, **words)
    p.grad = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    return [
        optimizer.state[p][f"block0.factor{n}"][0] - torch.eye(d, dtype=p.dtype)
        for n, d in enumerate((2, 6))
    ]


@pytest.mark.parametrize("method", [rootfree.IFShampoo, rootfree.RFShampoo])
def test_the_long_axis_moves_less(method):
    options = {"factor_norm": None, "init_scale": 1.0}
    short, long = moved(method, by_rank=False, **options)
    same, less = moved(method, by_rank=True, **options)
    torch.testing.assert_close(same, short, rtol=1e-12, atol=0)
    torch.testing.assert_close(less, long * 2 / 6, rtol=1e-10, atol=1e-15)


def test_a_given_curvature_has_its_own_rank():
    options = {"init_scale": 1.0, "curvature": FromGradients("kronecker")}
    for one, other in zip(
        moved(rootfree.IFShampoo, by_rank=False, **options),
        moved(rootfree.IFShampoo, by_rank=True, **options),
        strict=True,
    ):
        assert torch.equal(one, other)


class OfSome:
    """A curvature that knows some of the parameters."""

    def __init__(self, known):
        self.known, self.given = known, FromGradients("kronecker")

    def joint(self):
        return ()

    def check(self, params):
        pass

    def of(self, p, *, batch_size):
        return self.given.of(p, batch_size=batch_size) if p in self.known else None

    def used(self):
        pass


def run(method, chosen, dtype=torch.float64, device="cpu", **options):
    """Some of three parameters after four steps; the second has a given curvature."""
    generator = torch.Generator().manual_seed(0)
    ps = [nn.Parameter(torch.zeros(2, 6, dtype=dtype, device=device)) for _ in range(3)]
    gs = [torch.randn(4, 2, 6, dtype=torch.float64, generator=generator).to(ps[0]) for _ in ps]
    words = {"batch_size": 3, "update_every": 1, "curvature": OfSome({ps[1]}), **options}
    optimizer = method([ps[i] for i in chosen], **words)
    for step in range(4):
        for i in chosen:
            ps[i].grad = gs[i][step]
        optimizer.step()
    return [ps[i].detach() for i in chosen]


@pytest.mark.parametrize("method", [rootfree.IFShampoo, rootfree.RFShampoo])
@pytest.mark.parametrize("options", [{}, {"block_size": 3}], ids=["whole", "cut"])
def test_neighbours_in_a_stack_change_nothing(method, options):
    """Blocks of one shape are worked on together, with a given curvature and without."""
    for i, p in enumerate(run(method, [0, 1, 2], **options)):
        torch.testing.assert_close(p, *run(method, [i], **options), rtol=1e-13, atol=0)


def test_nor_where_kernels_run():
    """Another rate moved parameters twice as far.

    Rounding to bf16 moves them by a hundredth of their size: products of stacks and of single
    blocks add up in another order, so that a sum may round to the neighbouring number.
    """
    pytest.importorskip("triton")
    products = {"matmul_dtype": torch.bfloat16, "fused": True}
    words = {"dtype": torch.float32, "device": DEVICE, **products}
    for i, p in enumerate(run(rootfree.IFShampoo, [0, 1, 2], **words)):
        (alone,) = run(rootfree.IFShampoo, [i], **words)
        size = float(alone.abs().max())
        torch.testing.assert_close(p, alone, rtol=0, atol=0.02 * size)
