"""Groups and state changed by hand between steps, as with torch's optimizers.

Pruning, growing and layer-wise schedules replace parameters and state. From then on an optimizer
does what a new one with the same parameters and the same state does.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections import defaultdict

import pytest
import torch
from torch import nn

from conformance.problems import identical, snapshot

SHAPES = [(4, 3), (4, 3), (5,), (2, 3, 2)]


def parameter(seed: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def ps_of(optimizer) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def step(optimizer, number: int) -> None:
    for i, p in enumerate(ps_of(optimizer)):
        generator = torch.Generator().manual_seed(100 * number + i)
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


@pytest.fixture
def optimizer(row):
    """An optimizer after three steps."""
    optimizer = row.make([parameter(i, *shape) for i, shape in enumerate(SHAPES)])
    for number in range(3):
        step(optimizer, number)
    return optimizer


def assert_goes_on_like_a_new_one(row, optimizer) -> None:
    """What state there is goes into a new optimizer; what is missing starts anew in both."""
    twins = [nn.Parameter(p.detach().clone()) for p in ps_of(optimizer)]
    new = row.make(twins)
    for p, q in zip(ps_of(optimizer), twins, strict=True):
        held = {k: t for k, t in optimizer.state.get(p, {}).items() if t is not None}
        new.state[q].update({key: torch.as_tensor(t).clone() for key, t in held.items()})
    for number in range(3, 6):
        step(optimizer, number)
        step(new, number)
    for p, q in zip(ps_of(optimizer), twins, strict=True):
        assert optimizer.state[p].keys() == new.state[q].keys()
        pairs = [(p, q), *((t, new.state[q][key]) for key, t in optimizer.state[p].items())]
        for mine, theirs in pairs:
            if "bf16" not in row.name:
                assert torch.equal(mine, theirs)
            elif mine.is_floating_point():
                # The noise of stochastic rounding depends on when a parameter came: 2⁻⁷ in the
                # four factors of a direction, and three of these in a momentum.
                torch.testing.assert_close(mine, theirs, rtol=2**-5, atol=2**-4)


def replace_by_another_shape(optimizer):
    ps_of(optimizer)[0] = parameter(7, 6, 2)


def replace_with_its_state(optimizer):
    ps = ps_of(optimizer)
    new = nn.Parameter(ps[1].detach().clone())
    optimizer.state[new] = optimizer.state.pop(ps[1])
    ps[1] = new


def append(optimizer):
    ps_of(optimizer).append(parameter(8, 4, 3))


def remove(optimizer):
    del optimizer.state[ps_of(optimizer).pop(1)]


def exchange(optimizer):
    ps = ps_of(optimizer)
    ps[0], ps[1] = ps[1], ps[0]


def clear(optimizer):
    optimizer.state.clear()


def new_state(optimizer):
    optimizer.state = defaultdict(dict)


def empty_state_of_one(optimizer):
    optimizer.state[ps_of(optimizer)[1]] = {}


def no_momentum(optimizer):
    """As torch's SGD has it before its first step."""
    state = optimizer.state[ps_of(optimizer)[1]]
    state |= {"momentum": None} if "momentum" in state else {}


def plain_count(optimizer):
    state = optimizer.state[ps_of(optimizer)[1]]
    state |= {"step": 0} if "step" in state else {}


def momentum_alone(optimizer):
    p = ps_of(optimizer)[1]
    optimizer.state[p] = {k: t for k, t in optimizer.state[p].items() if k == "momentum"}


def exchange_state(optimizer):
    p, q, *_ = ps_of(optimizer)
    optimizer.state[p], optimizer.state[q] = optimizer.state[q], optimizer.state[p]


def halve_in_place(optimizer):
    for t in optimizer.state[ps_of(optimizer)[0]].values():
        if t.is_floating_point():
            t *= 0.5


SURGERY = [
    replace_by_another_shape,
    replace_with_its_state,
    append,
    remove,
    exchange,
    clear,
    new_state,
    empty_state_of_one,
    no_momentum,
    plain_count,
    momentum_alone,
    exchange_state,
    halve_in_place,
]


@pytest.mark.parametrize("change", SURGERY, ids=lambda change: change.__name__)
def test_surgery(row, optimizer, change):
    change(optimizer)
    assert_goes_on_like_a_new_one(row, optimizer)


def test_a_parameter_that_starts_anew_is_not_the_one_that_went_on(optimizer):
    """The comparison above bites: without its state the next step is another one."""
    p = ps_of(optimizer)[0]
    start, state = p.detach().clone(), {k: t.clone() for k, t in optimizer.state[p].items()}
    step(optimizer, 3)
    after = p.detach().clone()
    with torch.no_grad():
        p.copy_(start)
    optimizer.state[p] = state
    step(optimizer, 3)
    assert torch.equal(p, after)
    with torch.no_grad():
        p.copy_(start)
    optimizer.state[p] = {}
    step(optimizer, 3)
    assert not torch.equal(p, after)


def test_a_parameter_that_was_replaced_is_released(optimizer):
    ps = ps_of(optimizer)
    gone = weakref.ref(ps[0])
    ps[0] = parameter(9, *SHAPES[0])
    step(optimizer, 3)
    gc.collect()
    assert gone() is None


def test_modules_swap_the_tensors_of_parameters(row):
    """As they do with sharded ones; torch refuses where a tensor has a weak reference."""
    trained = []
    for swap in (False, True):
        ps = [parameter(i, *shape) for i, shape in enumerate(SHAPES)]
        model, optimizer = nn.ParameterList(ps), row.make(ps)
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            for number in range(4):
                model.float()
                step(optimizer, number)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        trained.append(ps)
    assert all(map(torch.equal, *trained))


def test_a_group_of_another_optimizer_takes_its_parameters_along(row, optimizer):
    """Parameters move to another group together with their state."""
    p = ps_of(optimizer).pop(0)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [p]})
    alone = row.make([nn.Parameter(p.detach().clone())])
    (q,) = ps_of(alone)
    alone.state[q] = {key: t.clone() for key, t in optimizer.state[p].items()}
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        p.grad = torch.randn(p.shape, generator=generator)
        q.grad = p.grad.clone()
        optimizer.step()
        alone.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def insert(optimizer):
    ps_of(optimizer).insert(0, parameter(8, 4, 3))


@pytest.mark.parametrize("change", [append, insert, remove], ids=lambda change: change.__name__)
def test_names_follow_their_parameters(row, change):
    """Users replace parameters, and forget the names beside them."""
    names = ["a", "b", "c", "d"]
    optimizer = row.make(
        [(n, parameter(3, *shape)) for n, shape in zip(names, SHAPES, strict=True)]
    )
    step(optimizer, 0)
    known = dict(zip(ps_of(optimizer), names, strict=True))
    change(optimizer)
    optimizer.summary()  # nobody has looked at the groups yet
    step(optimizer, 1)
    found = optimizer.param_groups[0]["param_names"]
    for p, name in zip(ps_of(optimizer), found, strict=True):
        assert name == known.get(p, name)
    assert len({*found}) == len(found)
    assert all(name in optimizer.summary() for name in found)
    assert [each.name for each in optimizer.diagnostics().read()] == found
    optimizer.load_state_dict(optimizer.state_dict())


# --- what cannot be ----------------------------------------------------------------------------


def refused(optimizer, message: str) -> None:
    """The step raises, and no parameter, no state and no count has changed."""
    held = {p: {key: t.clone() for key, t in optimizer.state[p].items()} for p in ps_of(optimizer)}
    values = [p.detach().clone() for p in ps_of(optimizer)]
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert identical(values, [p.detach() for p in ps_of(optimizer)])
    for p, state in held.items():
        assert state.keys() == optimizer.state[p].keys()
        assert all(torch.equal(t, optimizer.state[p][key]) for key, t in state.items())


def first_key(optimizer, p) -> str:
    """A key of state whose shape depends on that of the parameter."""
    return next(key for key, t in optimizer.state[p].items() if key != "step" and t.dim() > 0)


def test_state_of_another_shape_is_refused_by_its_name(optimizer):
    p = ps_of(optimizer)[1]
    key = first_key(optimizer, p)
    must = re.escape(str(tuple(optimizer.state[p][key].shape)))
    optimizer.state[p][key] = torch.ones(7, 7)
    found = rf"state '{key}' of a parameter of shape \(4, 3\) has shape \(7, 7\)"
    refused(optimizer, rf"{found}, but must have {must}")


def test_a_parameter_of_another_shape_with_the_old_state_is_refused(optimizer):
    old, new = ps_of(optimizer)[0], parameter(7, 5, 2)
    optimizer.state[new] = optimizer.state.pop(old)
    ps_of(optimizer)[0] = new
    new.grad = torch.ones(5, 2)
    refused(optimizer, r"of a parameter of shape \(5, 2\) has shape")


@pytest.mark.parametrize("shape", [(2, 2), (6, 3)], ids=str)
def test_data_of_another_shape_is_refused(optimizer, shape):
    p = ps_of(optimizer)[0]
    p.data = torch.ones(shape)
    refused(optimizer, "has shape")
    p.grad = torch.ones(shape)
    refused(optimizer, "has shape")


@pytest.mark.parametrize("shape", [(2, 2), (6, 3)], ids=str)
def test_a_gradient_of_another_shape_is_refused(optimizer, shape):
    """One that is left from before `p.data` was replaced; nothing of it is read."""
    p = ps_of(optimizer)[0]
    p.data = torch.ones(shape)
    del optimizer.state[p]
    before = [q.detach().clone() for q in ps_of(optimizer)]
    with pytest.raises((RuntimeError, ValueError)):  # of the gradient, or of H made of it
        optimizer.step()
    assert identical(before, [q.detach() for q in ps_of(optimizer)])


def test_after_a_refusal_it_goes_on(row, optimizer):
    p = ps_of(optimizer)[1]
    held = optimizer.state[p]
    optimizer.state[p] = {**held, first_key(optimizer, p): torch.ones(7)}
    with pytest.raises(RuntimeError, match="has shape"):
        optimizer.step()
    optimizer.state[p] = held
    before = snapshot(optimizer)
    assert_goes_on_like_a_new_one(row, optimizer)
    assert not identical(before, snapshot(optimizer))


def test_a_parameter_that_is_there_twice_is_refused(row, optimizer):
    """It has one state: it would be updated twice with it, or lose it."""
    p = ps_of(optimizer)[0]
    other = {**optimizer.param_groups[0], "params": [p]}
    for twice in (lambda: ps_of(optimizer).append(p), lambda: optimizer.param_groups.append(other)):
        twice()
        before = snapshot(optimizer)
        with pytest.raises(ValueError, match=r"of shape \(4, 3\) is given twice"):
            optimizer.step()
        assert identical(before, snapshot(optimizer))
        del optimizer.param_groups[1:], ps_of(optimizer)[len(SHAPES) :]
    assert_goes_on_like_a_new_one(row, optimizer)


def test_a_parameter_of_integers_is_refused(optimizer):
    ps_of(optimizer).append(torch.ones(3, dtype=torch.int64))
    before = [p.detach().clone() for p in ps_of(optimizer)]
    with pytest.raises(TypeError, match=r"parameter 4 of shape .* real floating-point dtype"):
        optimizer.step()
    assert identical(before, [p.detach() for p in ps_of(optimizer)])
