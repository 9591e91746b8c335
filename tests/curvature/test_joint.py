"""A weight and its bias as one matrix [W b]."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rootfree
from curvature.given import KINDS, Given, draw
from curvature.runs import ALL_METHODS, BALANCED

WEIGHTS = [(3, 4), (3, 1, 2, 2)]


def parameter(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values.clone().contiguous())


def matrix_of(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight.flatten(1), bias[:, None]], dim=1)


def joint_pair(shape: tuple[int, ...] = (3, 4)) -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64, generator=generator)
    return nn.Parameter(weight), nn.Parameter(torch.ones(shape[0], dtype=torch.float64))


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_pair_moves_as_one_matrix(method, kind, shape):
    weight, bias = joint_pair(shape)
    whole = parameter(matrix_of(weight.detach(), bias.detach()))
    other, another = parameter(weight.detach()), parameter(bias.detach())  # not joint
    given = Given(joint=[(weight, bias)])
    make, words = ALL_METHODS[method][0], dict(BALANCED[method])
    if method not in ("RFRMSprop", "RFAdagrad", "RFAdamW"):
        words["block_size"] = 4
    pair = make([other, bias, weight, another], curvature=given, **words)
    single = make([whole], curvature=given, **words)
    rng = np.random.default_rng(0)
    for _ in range(4):
        g = torch.tensor(0.3 * rng.normal(size=whole.shape))
        H = None if kind is None else draw(kind, tuple(whole.shape), rng)
        given.answers = {weight: H, whole: H}
        whole.grad = g
        weight.grad, bias.grad = g[:, :-1].reshape(shape), g[:, -1]
        other.grad, another.grad = torch.ones_like(other), torch.ones_like(another)
        pair.step()
        single.step()
    torch.testing.assert_close(matrix_of(weight, bias), whole, rtol=1e-14, atol=1e-14)


def test_the_state_belongs_to_the_weight():
    weight, bias = joint_pair()
    given = Given(joint=[(weight, bias)])
    optimizer = rootfree.IFShampoo(
        [("layer.weight", weight), ("layer.bias", bias)], batch_size=1, curvature=given
    )
    assert set(optimizer.state[bias]) == {"momentum", "step"}
    assert optimizer.state[weight]["block0.factor1"].shape == (1, 5, 5)
    rows = optimizer.summary().splitlines()
    assert "dense 3 x dense 5 (with its bias)" in rows[1]
    assert "with its weight" in rows[2]


@pytest.mark.parametrize("method", ["IFShampoo", "RFFullAdagrad", "RFRMSprop"])
def test_without_momentum_the_bias_may_have_no_state(method):
    weight, bias = joint_pair()
    given = Given(joint=[(weight, bias)])
    words = {**BALANCED[method], "momentum": 0.0}
    optimizer = ALL_METHODS[method][0]([bias, weight], curvature=given, **words)
    before = bias.detach().clone()
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    optimizer.step()
    assert (bias != before).all()


@pytest.mark.parametrize("missing", ["weight", "bias", "both"])
@pytest.mark.parametrize("method", ["IFShampoo", "RFShampoo", "RFRMSprop"])
def test_a_missing_gradient_counts_as_zero_and_its_parameter_stays(method, missing):
    weight, bias = joint_pair()
    given = Given(joint=[(weight, bias)])
    optimizer = ALL_METHODS[method][0]([weight, bias], curvature=given, **BALANCED[method])
    given.answers = {weight: draw("kronecker", (3, 5), np.random.default_rng(0))}
    before = {"weight": weight.detach().clone(), "bias": bias.detach().clone()}
    weight.grad = None if missing in ("weight", "both") else torch.ones_like(weight)
    bias.grad = None if missing in ("bias", "both") else torch.ones_like(bias)
    optimizer.step()
    for name, p in (("weight", weight), ("bias", bias)):
        assert torch.equal(p, before[name]) == (missing in (name, "both"))


@pytest.mark.parametrize("method", ["IFShampoo", "RFFullAdagrad", "RFRMSprop"])
def test_a_layer_without_inputs(method):
    layer = nn.Linear(0, 3).double()
    given = Given(joint=[(layer.weight, layer.bias)])
    options = BALANCED[method]
    optimizer = ALL_METHODS[method][0](layer.parameters(), curvature=given, **options)
    alone = parameter(layer.bias.detach())
    other = ALL_METHODS[method][0]([alone], **options)
    layer(torch.ones(2, 0).double()).sum().backward()
    alone.grad = layer.bias.grad
    optimizer.step()
    other.step()
    torch.testing.assert_close(layer.bias, alone)


def test_a_pair_must_be_in_one_group():
    weight, bias = joint_pair()
    given = Given(joint=[(weight, bias)])
    words: dict[str, Any] = {"batch_size": 1, "curvature": given}
    message = "without its (bias|weight) .*same group"
    for groups in ([weight], [bias], [{"params": [weight]}, {"params": [bias]}], [("w", weight)]):
        with pytest.raises(ValueError, match=message):
            rootfree.IFShampoo(groups, **words)
    # late groups too, and nothing is added
    other = nn.Parameter(torch.ones(2, 2))
    optimizer = rootfree.RFRMSprop([other], **words)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [weight, bias]})


def test_pairs_that_are_none_are_refused():
    weight, bias = joint_pair()
    words: dict[str, Any] = {"batch_size": 1}
    for pair in [(bias, weight), (weight, nn.Parameter(torch.ones(4)))]:
        with pytest.raises(ValueError, match="a joint pair must be"):
            rootfree.IFShampoo([weight, bias], curvature=Given(joint=[pair]), **words)
    twice = Given(joint=[(weight, bias), (weight, nn.Parameter(torch.ones(3)))])
    with pytest.raises(ValueError, match="two joint pairs"):
        rootfree.IFShampoo([weight, bias], curvature=twice, **words)
    single = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="same dtype"):
        rootfree.IFShampoo([weight, single], curvature=Given(joint=[(weight, single)]), **words)


@pytest.mark.parametrize("late", ["weight", "bias"])
@pytest.mark.parametrize("method", ["IFShampoo", "RFShampoo", "RFFullAdagrad"])
def test_a_pair_is_refreshed_as_one_whoever_missed_a_step(method, late):
    """The counts differ from then on, but [W b] is one matrix with one direction."""
    weight, bias = joint_pair()
    given = Given(joint=[(weight, bias)])
    words = {**BALANCED[method], "momentum": 0.0, "weight_decay": 0.0, "update_every": 2}
    optimizer = ALL_METHODS[method][0]([weight, bias], curvature=given, **words)
    rng, moved = np.random.default_rng(0), []
    for t in range(4):
        given.answers = {weight: draw("kronecker", (3, 5), rng)}
        weight.grad, bias.grad = (torch.tensor(rng.normal(size=p.shape)) for p in (weight, bias))
        if t == 0:
            {"weight": weight, "bias": bias}[late].grad = None
        before = matrix_of(weight.detach(), bias.detach())
        held = {k: v.clone() for k, v in optimizer.state[weight].items() if "block" in k}
        optimizer.step()
        moved.append(any(not torch.equal(v, optimizer.state[weight][k]) for k, v in held.items()))
        if t > 0:
            # With factors that stand still, the same step from a pair that missed nothing.
            twins = [parameter(weight.detach()), parameter(bias.detach())]
            again = Given(joint=[(twins[0], twins[1])])
            other = ALL_METHODS[method][0](twins, curvature=again, **{**words, "update_every": 9})
            for p, q in zip((weight, bias), twins, strict=True):
                q.grad = p.grad
                state = {k: v.clone() for k, v in optimizer.state[p].items()}
                other.state[q] = {**state, "step": torch.tensor(1)}
            after = matrix_of(*(q.detach().clone() for q in twins))
            other.step()
            expected = matrix_of(*(q.detach() for q in twins)) - after
            found = matrix_of(weight.detach(), bias.detach()) - before
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not all(moved)
