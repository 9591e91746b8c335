"""Bad input: one clear error that names what is wrong, before anything is changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import rootfree
from conformance.problems import groups_without_params, identical, network, snapshot
from conformance.rows import ROWS

BAD = {
    "lr": [-1e-3, math.nan, math.inf, "0.1", None, True, torch.ones(2)],
    "batch_size": [0, -4, 1.5, 32.0, "32", True, math.nan],
    "precond_lr": [-0.1, math.nan, "small", None],
    "momentum": [-0.1, 1.0, math.nan, None],
    "riemannian_momentum": [-0.1, 1.0, math.nan],
    "betas": [0.9, (0.9,), (0.9, 1.0), (math.nan, 0.9), ("a", 0.5), None],
    "damping": [-1e-8, math.nan, math.inf, None],
    "weight_decay": [-1e-8, math.nan, "0"],
    "rate_by_rank": [1, 0, "yes", None],
    "maximize": [1, 0, "yes", None],
    "nesterov": [1, 0, "yes", None],
    "fast_start": [1, 0, "yes", None],
    "safeguard": [1, 0, "yes", None],
    "decoupled_weight_decay": [1, 0.0, "no", None],
    "gamma": [-0.1, 1.1, math.nan],
    "update_every": [0, -1, 1.5, True, None, "rarely", "math:no_such_function", "logarithmic:0"],
    "structure": ["dence", "block_diagonal", "block_diagonal:0", 3, None, (), {0: "dense"}, [1]],
    "block_size": [0, -3, 2.5, "all", True],
    "factor_norm": ["nuclear", 2],
    "update_rms": [0.0, -0.2, math.nan],
    "max_update_rms": [0.0, -1.0, math.nan],
    "max_update": [0.0, -1.0, math.nan],
    "init_scale": [0.0, -1.0, math.nan, "random"],
    "factor_dtype": [torch.int8, "bfloat16", torch.float16],
    "matmul_dtype": [torch.int8, "bfloat16"],
    "form": ["cholesky", None],
    "state_dtype": [torch.int32, "float32", torch.float16],
}


with_batch_size = pytest.mark.parametrize(
    "row", [row for row in ROWS if row.has_batch_size], ids=lambda row: row.name
)


def test_bad_options_name_the_argument_and_the_value(row):
    """Every option of the optimizer has bad values in the table above (a KeyError otherwise)."""
    optimizer = row.make(network().parameters())
    before, groups = snapshot(optimizer), groups_without_params(optimizer)
    extra = nn.Parameter(torch.ones(2, 2))
    for option in optimizer.options:
        for value in BAD[option]:
            with pytest.raises((ValueError, TypeError), match=option) as error:
                row.make([extra], **{option: value})
            assert "must be" in str(error.value) or "must hold" in str(error.value)
            with pytest.raises((ValueError, TypeError), match=option):
                optimizer.add_param_group({"params": [extra], option: value})
            assert identical(before, snapshot(optimizer))
            assert groups == groups_without_params(optimizer)
            assert extra not in optimizer.state


def test_options_that_became_bad_are_refused_by_the_next_step(row):
    """Schedulers and users set them in `param_groups`; what they make of lr and decay is theirs."""
    p = nn.Parameter(torch.ones(2, 3))
    optimizer = row.make([p])
    (group,) = optimizer.param_groups
    for steps in range(2):  # before the first step, and after it
        p.grad = torch.ones(2, 3)
        before = snapshot(optimizer)
        for option in {*optimizer.options} - {"lr", "weight_decay"}:
            good = group[option]
            for value in BAD[option]:
                group[option] = value
                with pytest.raises((ValueError, TypeError), match=option):
                    optimizer.step()
            group[option] = good
        assert identical(before, snapshot(optimizer))
        optimizer.step()
        assert not identical(before, snapshot(optimizer)), steps


def test_bad_parameters(row):
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="empty parameter list"):
        row.make([])
    with pytest.raises(ValueError, match="given twice"):
        row.make([p, nn.Parameter(torch.ones(1)), p])
    with pytest.raises(ValueError, match=r"parameter w of shape .* given twice"):
        row.make([("v", p), ("w", p)])
    with pytest.raises(TypeError, match="parameter 0 must be a Tensor, got str"):
        row.make(["weight"])
    with pytest.raises(TypeError, match="order"):
        row.make([{"params": {p}}])
    for model in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):  # the second has an iterator
        for given in (model, [{"params": model}]):
            with pytest.raises(TypeError, match=r"got a model .*: give model\.parameters\(\)"):
                row.make(given)
    with pytest.raises(TypeError, match=r"floating-point dtype, got torch\.complex64"):
        row.make([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="non-leaf"):
        row.make([p * 2])
    optimizer = row.make([p])
    before = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="given twice"):
        optimizer.add_param_group({"params": [p]})
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([p])
    assert len(optimizer.param_groups) == before


def test_misspelt_options(row):
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"has no option 'weight_decai'.*'weight_decay'"):
        row.make([{"params": [p], "weight_decai": 0.1}])
    row.make([{"params": [p], "name": "head", "initial_lr": 0.1}])  # others may keep their own
    with pytest.raises(TypeError):
        row.make([p], weight_decai=0.1)


def test_a_method_without_batch_size_says_so():
    optimizer = rootfree.IFWhitening([torch.nn.Parameter(torch.ones(2, 2))])
    for wrong in (
        lambda: optimizer.batch_size,
        lambda: setattr(optimizer, "batch_size", 8),
        lambda: rootfree.track_batch_size(torch.nn.Linear(1, 1), optimizer),
    ):
        with pytest.raises(AttributeError, match="IFWhitening has no batch_size"):
            wrong()


@with_batch_size
def test_missing_batch_size_raises_at_the_first_step_and_says_what_it_is(row):
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = row.make([p], batch_size=None)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="number of loss terms that the loss averages"):
        optimizer.step()
    assert identical(before, snapshot(optimizer))
    optimizer.batch_size = 8
    optimizer.step()
    assert optimizer.batch_size == 8


@with_batch_size
def test_batch_size_property_sets_all_groups(row):
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = row.make([{"params": [a], "batch_size": 4}, {"params": [b]}], batch_size=8)
    with pytest.raises(ValueError, match="different values of batch_size"):
        _ = optimizer.batch_size
    for wrong in (0, 2.5, "8", None):
        with pytest.raises((ValueError, TypeError), match="batch_size must be a positive integer"):
            optimizer.batch_size = wrong
    assert [group["batch_size"] for group in optimizer.param_groups] == [4, 8]
    optimizer.batch_size = 16
    assert [group["batch_size"] for group in optimizer.param_groups] == [16, 16]


def sparse_gradient() -> nn.Parameter:
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    return embedding.weight


def test_sparse_gradients_are_refused_and_change_nothing(row):
    dense = nn.Parameter(torch.ones(2))
    dense.grad = torch.ones(2)
    optimizer = row.make([{"params": [dense]}, {"params": [sparse_gradient()]}])
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) is sparse_coo.*dense"):
        optimizer.step()
    assert identical(before, snapshot(optimizer))


def test_complex_gradients_are_refused_and_change_nothing(row):
    class WithComplexGradient(nn.Parameter):
        grad = torch.ones(2, dtype=torch.complex64)

    optimizer = row.make([WithComplexGradient(torch.ones(2))])
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="is complex"):
        optimizer.step()
    assert identical(before, snapshot(optimizer))
