"""Which factor each axis gets, and the checks of the options that decide it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rootfree
from rootfree.layout.structured import structure_option, structured_tiles
from rootfree.shell.checks import init_scale, positive
from rootfree.shell.parameter_state import product_dtype
from rootfree.structures import make_structure


def described(shape, *, structure="auto", block_size=1024) -> list[tuple[int, list[str]]]:
    return [
        (tile.blocks, [f"{s.name} {s.d}" for s in structures])
        for tile, structures in structured_tiles(
            shape, structure=structure_option("structure", structure), block_size=block_size
        )
    ]


def test_auto():
    """Dense, but diagonal for vectors; an axis as long as a vocabulary is cut like any other."""
    assert described((768,)) == [(1, ["diagonal 768"])]
    assert described(()) == [(1, ["diagonal 1"])]
    assert described((1, 1)) == [(1, ["diagonal 1"])]
    assert described((768, 512)) == [(1, ["dense 768", "dense 512"])]
    assert described((768, 3072)) == [(3, ["dense 768", "dense 1024"])]
    assert described((16384, 768)) == [(16, ["dense 1024", "dense 768"])]
    assert described((20000, 768)) == [(25, ["dense 800", "dense 768"])]
    assert described((50257, 768)) == [
        (42, ["dense 1008", "dense 768"]),
        (7, ["dense 992", "dense 768"]),
        (1, ["dense 977", "dense 768"]),
    ]
    assert described((512, 512, 3, 3)) == [(1, ["dense 512", "dense 512", "dense 9"])]
    assert described((50257, 768), block_size=None) == [(1, ["dense 50257", "dense 768"])]
    assert described((64, 3, 7, 7), block_size=None) == [
        (1, ["dense 64", "dense 3", "dense 7", "dense 7"])
    ]


def test_names_tuples_and_dicts():
    assert described((4, 6), structure="lower_triangular") == [
        (1, ["lower_triangular 4", "lower_triangular 6"])
    ]
    assert described((4, 6), structure=("diagonal", "hierarchical:2")) == [
        (1, ["diagonal 4", "hierarchical:2 6"])
    ]
    by_axes = {1: "dense", 2: ("auto", "diagonal")}
    assert described((5,), structure=by_axes) == [(1, ["dense 5"])]
    assert described((4, 6), structure=by_axes) == [(1, ["dense 4", "diagonal 6"])]
    assert described((4, 6, 5), structure=by_axes, block_size=None)[0][1][0] == "dense 4"
    assert described((4, 6), structure=["dense", "diagonal"]) == described(
        (4, 6), structure=("dense", "diagonal")
    )


def test_a_dict_becomes_plain_pairs():
    assert structure_option("structure", {2: "dense", 1: "diagonal"}) == (
        (1, "diagonal"),
        (2, "dense"),
    )
    pairs = structure_option("structure", {2: ("dense", "diagonal")})
    assert structure_option("structure", pairs) == pairs  # what a checkpoint brings back


def test_a_pair_of_names_is_a_tuple_of_names():
    """("dense", "diagonal") has two entries of more than two letters: not pairs."""
    assert structure_option("structure", ("dense", "diagonal")) == ("dense", "diagonal")


def test_a_diagonal_axis_is_cut_into_longer_pieces():
    """A block then costs what one with two dense factors does. All diagonal: it is whole."""
    assert described((3000, 2048), structure=("diagonal", "dense")) == [
        (2, ["diagonal 1504", "dense 1024"]),
        (2, ["diagonal 1496", "dense 1024"]),
    ]
    assert described((3000, 2048), structure="diagonal") == [
        (1, ["diagonal 3000", "diagonal 2048"])
    ]
    assert described((3000,), structure="auto") == [(1, ["diagonal 3000"])]


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 60), max_size=4).map(tuple),
    block_size=st.none() | st.integers(1, 40),
    structure=st.sampled_from(["auto", "dense", "diagonal", "block_diagonal:7", "hierarchical:3"]),
)
def test_every_element_gets_a_factor_of_its_blocks_size(shape, block_size, structure):
    elements = 0
    for tile, structures in structured_tiles(shape, structure=structure, block_size=block_size):
        assert tuple(s.d for s in structures) == tile.sizes
        size = 1
        for s in structures:
            size *= s.d
            assert block_size is None or s.d <= block_size or s.kind == "diagonal"
        elements += tile.blocks * size
    assert elements == torch.Size(shape).numel()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("dens", "did you mean dense"),
        (("dense", 3), "must be 'auto', a structure's name"),
        ({"2": "dense"}, "number of axes '2'"),
        ({True: "dense"}, "number of axes True"),
        ({1: "triangular"}, "structure must be"),
        ({}, "structure must be"),
        (None, "structure must be"),
    ],
    ids=repr,
)
def test_wrong_structures_are_refused(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        structure_option("structure", wrong)


def test_init_scale_and_positive():
    assert init_scale("init_scale", "gradient") == "gradient"
    assert init_scale("init_scale", 2) == 2.0
    assert positive("update_rms", 0.2) == 0.2
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="x must be in"):
            positive("x", wrong)
    for wrong in ("grad", None, True):
        with pytest.raises(TypeError, match="init_scale must be"):
            init_scale("init_scale", wrong)


def test_dtype_of_products():
    single, half, double = (
        nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float64)
    )
    dense = (make_structure("dense", 2),)
    assert product_dtype(single, dense, {"matmul_dtype": None}) == torch.float32
    assert product_dtype(half, dense, {"matmul_dtype": None}) == torch.float32
    assert product_dtype(single, dense, {"matmul_dtype": torch.bfloat16}) == torch.bfloat16
    # scaled first
    assert product_dtype(single, dense, {"matmul_dtype": torch.float16}) == torch.float32
    for asked in (None, torch.bfloat16, torch.float32):
        assert product_dtype(double, dense, {"matmul_dtype": asked}) == torch.float64
    # no matrix products, nothing narrower than fp32
    diagonal = (make_structure("diagonal", 2),)
    assert product_dtype(single, diagonal, {"matmul_dtype": torch.bfloat16}) == torch.float32


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("precond_lr", 1.0),
        ("precond_lr", -0.1),
        ("riemannian_momentum", 1.0),
        ("gamma", 1.1),
        ("gamma", -0.1),
        ("damping", -1.0),
        ("factor_norm", "nuclear"),
        ("factor_dtype", torch.float16),
        ("matmul_dtype", torch.int32),
        ("update_rms", 0.0),
        ("max_update_rms", -1.0),
        ("block_size", 0),
        ("nesterov", 1),
        ("decoupled_weight_decay", None),
    ],
)
def test_out_of_range_options_are_refused_by_name(name, wrong):
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        rootfree.IFShampoo([nn.Parameter(torch.ones(2))], batch_size=1, **{name: wrong})


def test_full_matrix_rates_follow_gamma():
    p = nn.Parameter(torch.ones(2))
    rootfree.RFFullAdagrad([p], batch_size=1, precond_lr=3.0)  # γ = 0: any rate
    with pytest.raises(ValueError, match="precond_lr must be below 1/gamma = 2"):
        rootfree.RFFullAdagrad([p], batch_size=1, precond_lr=2.0, gamma=0.5)


@pytest.mark.parametrize(
    "ignored", [{"init_scale": 2.0}, {"init_scale": "gradient"}, {"riemannian_momentum": 0.5}]
)
def test_the_covariance_form_uses_or_refuses_every_option_it_takes(ignored):
    """Silently doing something else than asked is neither."""

    def run(**options) -> torch.Tensor:
        p = nn.Parameter(torch.ones(3))
        optimizer = rootfree.IFFullAdagrad(
            [p], batch_size=4, form="covariance", precond_lr=0.1, **options
        )
        for t in range(3):
            p.grad = torch.arange(3.0) + t
            optimizer.step()
        return p.detach()

    try:
        found = run(**ignored)
    except ValueError:
        return
    assert not torch.equal(found, run())


@pytest.mark.parametrize("safeguard", [True, False])
@pytest.mark.parametrize(("before", "after"), [("factor", "covariance"), ("covariance", "factor")])
def test_a_change_of_form_keeps_the_preconditioner(before, after, safeguard):
    p = nn.Parameter(torch.ones(3, 4))
    optimizer = rootfree.IFFullAdagrad(
        [p], batch_size=4, form=before, precond_lr=0.1, safeguard=safeguard
    )
    for seed in range(20):
        p.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.step()

    def inverse() -> torch.Tensor:
        state = optimizer.state_dict()["state"][0]
        A = state.get("block0.factor0")
        return state["block0.inverse"] if A is None else A @ A.mT

    found = inverse()
    optimizer.param_groups[0]["form"] = after
    assert (found - torch.eye(12)).abs().max() > 0.1
    # fp32 has 2⁻²⁴; a triangular factor of size one takes it d times
    torch.testing.assert_close(inverse(), found, rtol=0, atol=12 * 2**-24)
    optimizer.step()
