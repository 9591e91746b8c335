"""torch's switches `maximize`, `foreach` and `differentiable`: right, or refused in words."""

from __future__ import annotations

import pickle

import pytest
import torch

import rootfree
from conformance.curvatures import FromGradients
from conformance.problems import batches, loss_of, network, snapshot

METHODS = [getattr(rootfree, name) for name in rootfree.__all__ if name.startswith(("RF", "IF"))]
MATRIX = [rootfree.IFWhitening, rootfree.RFShampoo]


def make(method, params, **options):
    B = {"batch_size": 32} if "batch_size" in method.options else {}
    return method(params, **B, **options)


def trained(method, groups, *, sign, steps=3, **options):
    model = network()
    optimizer = make(method, groups(model), **options)
    for x, y in batches(steps):
        optimizer.zero_grad()
        (sign * loss_of(model, x, y)).backward()
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
    return optimizer


def everything(model):
    return list(model.parameters())


def with_a_companion(model):
    return rootfree.parameter_groups(model)


@pytest.mark.parametrize(
    ("method", "groups"),
    [*((m, everything) for m in METHODS), *((m, with_a_companion) for m in MATRIX)],
    ids=lambda each: each.__name__,
)
def test_maximize_goes_up_what_would_go_down(method, groups):
    """Bit for bit the steps on the objective with its sign turned."""
    up = trained(method, groups, sign=-1, maximize=True)
    down = trained(method, groups, sign=1)
    assert all(map(torch.equal, snapshot(up), snapshot(down)))
    other_way = trained(method, groups, sign=1, maximize=True)
    assert not all(map(torch.equal, snapshot(other_way), snapshot(down)))


def test_a_group_may_go_the_other_way():
    """A multiplier is raised while the weight is lowered."""
    weight, multiplier = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [weight]}, {"params": [multiplier], "maximize": True}]
    optimizer = rootfree.RFRMSprop(groups, batch_size=1)
    (weight + multiplier).sum().backward()
    optimizer.step()
    assert weight < 1 < multiplier


def test_maximize_travels_with_checkpoints_and_older_ones_load():
    params = [torch.nn.Parameter(torch.ones(2))]
    saved = rootfree.RFRMSprop(params, maximize=True).state_dict()
    optimizer = rootfree.RFRMSprop(params)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["maximize"] is True
    del saved["param_groups"][0]["maximize"]
    optimizer = rootfree.RFRMSprop(params)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["maximize"] is False
    del optimizer.param_groups[0]["maximize"]
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["maximize"] is False


def test_maximize_is_refused_beside_a_given_curvature():
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    curvature = FromGradients("outer products")
    with pytest.raises(ValueError, match=r"maximize must be False .* Turn the sign of the loss"):
        rootfree.IFShampoo(params, maximize=True, curvature=curvature)
    optimizer = rootfree.IFShampoo(params, curvature=curvature)
    saved = rootfree.IFShampoo(params, maximize=True).state_dict()
    with pytest.raises(ValueError, match="maximize must be False"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["maximize"] is False


@pytest.mark.parametrize("method", METHODS)
def test_what_no_method_has_is_refused(method):
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    for value in (None, True):
        make(method, params, foreach=value, differentiable=False)
    for switches, message in [
        ({"foreach": False}, "foreach must be None or True, got False"),
        ({"foreach": True, "fused": True}, "foreach and fused must not both be True"),
        ({"differentiable": True}, "differentiable must be False, got True"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(method, params, **switches)
    with pytest.raises(TypeError, match="maximize must be True or False, got 1"):
        make(method, params, maximize=1)
