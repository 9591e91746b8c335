"""Saving and resuming, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import rootfree
from conformance.problems import (
    batches,
    groups_without_params,
    identical,
    network,
    snapshot,
    train,
)
from conformance.rows import ROWS


def through_a_file(state_dict: dict) -> dict:
    """torch.save, then torch.load with its safe default."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def test_resume_is_bit_identical(row):
    model = network()
    optimizer = row.make(model.parameters())
    train(model, optimizer, batches(6))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    fresh_model = network(seed=7)
    fresh = row.make(fresh_model.parameters())
    fresh_model.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    assert identical(snapshot(fresh), snapshot(optimizer))

    train(model, optimizer, batches(10, seed=2))
    train(fresh_model, fresh, batches(10, seed=2))
    assert identical(snapshot(fresh), snapshot(optimizer))

    # and back into an optimizer that has gone on
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, batches(10, seed=2))
    assert identical(snapshot(fresh), snapshot(optimizer))


def test_the_checkpoints_hyper_parameters_win(row):
    model = network()
    B = {"batch_size": 77} if row.has_batch_size else {}
    optimizer = row.make(model.parameters(), lr=0.123, damping=0.5, **B)
    other = row.make(network().parameters())
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert groups_without_params(other) == groups_without_params(optimizer)


def test_loading_keeps_tensors_dtypes_and_the_lr_tensor(row):
    model = network(torch.bfloat16)
    lr = torch.tensor(0.01)
    optimizer = row.make(model.parameters(), lr=lr)
    train(model, optimizer, batches(2, torch.bfloat16))
    saved = through_a_file(optimizer.state_dict())
    tensors = {p: dict(s) for p, s in optimizer.state.items()}
    dtypes = {p: {k: t.dtype for k, t in s.items()} for p, s in tensors.items()}
    saved["param_groups"][0]["lr"] = torch.tensor(0.5)
    optimizer.load_state_dict(saved)
    for p, state in optimizer.state.items():
        assert all(state[key] is tensors[p][key] for key in state)
        assert {k: t.dtype for k, t in state.items()} == dtypes[p]
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5


def test_deepcopy_and_pickle(row):
    model = network()
    optimizer = row.make(model.parameters())
    train(model, optimizer, batches(3))
    twin_model, twin = copy.deepcopy((model, optimizer))
    read_model, read = pickle.loads(pickle.dumps((model, optimizer)))
    for m, o in ((model, optimizer), (twin_model, twin), (read_model, read)):
        train(m, o, batches(5, seed=3))
    assert identical(snapshot(optimizer), snapshot(twin))
    assert identical(snapshot(optimizer), snapshot(read))
    assert next(twin_model.parameters()) is twin.param_groups[0]["params"][0]


def test_load_hooks_run(row):
    optimizer = row.make(network().parameters())
    calls = []

    def change_lr(_, state_dict):
        calls.append("pre")
        state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] = 0.25
        return state_dict

    optimizer.register_load_state_dict_pre_hook(change_lr)
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post"]
    assert optimizer.param_groups[0]["lr"] == 0.25


def of_torch(_, params):
    return torch.optim.AdamW(params).state_dict()


def of_another_method(row, params):
    cls = rootfree.RFAdamW if row.optimizer is rootfree.RFRMSprop else rootfree.RFRMSprop
    return cls(params, batch_size=1).state_dict()


def of_other_shapes(row, _):
    return row.make([*torch.nn.Linear(3, 3).parameters()] * 1).state_dict()


def of_transposed_shapes(row, params):
    return row.make([torch.nn.Parameter(torch.ones(*p.shape, 2)) for p in params]).state_dict()


def of_more_groups(row, params):
    params = list(params)
    return row.make([{"params": params[:1]}, {"params": params[1:]}]).state_dict()


def without_state(row, params):
    return {**row.make(params).state_dict(), "state": {}}


def not_a_checkpoint(row, params):
    return {"model": 1}


def with_bad_option(row, params):
    saved = row.make(params).state_dict()
    saved["param_groups"][0]["damping"] = -1.0
    return saved


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (of_torch, "another optimizer"),
        (of_another_method, "the checkpoint is of RF"),
        (of_other_shapes, "parameters in the checkpoint"),
        (of_transposed_shapes, "does not fit"),
        (of_more_groups, "2 parameter groups"),
        (without_state, "no state for parameter 0"),
        (not_a_checkpoint, "'param_groups'"),
        (with_bad_option, "damping must be in"),
    ],
)
def test_a_wrong_checkpoint_is_refused_and_changes_nothing(row, wrong, message):
    optimizer = row.make(network().parameters())
    saved = wrong(row, network().parameters())
    before, groups = snapshot(optimizer), groups_without_params(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert identical(before, snapshot(optimizer))
    assert groups == groups_without_params(optimizer)


WITH_MOMENTUM = [row for row in ROWS if "momentum" in row.optimizer.options]


@pytest.mark.parametrize(
    "schedule",
    [(0.0,), (0.9,), (0.9, 0.0), (0.0, 0.9)],
    ids=["off", "on", "turned-off", "turned-on"],
)
@pytest.mark.parametrize("row", WITH_MOMENTUM, ids=lambda row: row.name)
def test_checkpoints_with_and_without_momentum_load_into_either(row, schedule):
    """The last value may have been set without a step since: state and option then differ."""
    model = network()
    optimizer = row.make(model.parameters(), momentum=schedule[0])
    train(model, optimizer, batches(2))
    optimizer.param_groups[0]["momentum"] = schedule[-1]
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, batches(2, seed=2))
    for mine in (0.0, 0.9):
        other = network(seed=3)
        resumed = row.make(other.parameters(), momentum=mine)
        train(other, resumed, batches(1))
        other.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        assert resumed.param_groups[0]["momentum"] == schedule[-1]
        train(other, resumed, batches(2, seed=2))
        assert identical([*model.parameters()], [*other.parameters()])
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            for key, tensor in optimizer.state[p].items():
                assert torch.equal(tensor, resumed.state[q][key])


@pytest.mark.parametrize("row", WITH_MOMENTUM, ids=lambda row: row.name)
def test_momentum_may_be_off_for_some_parameters_that_had_it_and_some_that_had_not(row):
    """Turned off by a schedule, and then a parameter joins."""
    model = network()
    first, *rest = model.parameters()
    optimizer = row.make(rest, momentum=0.9)
    train(model, optimizer, batches(2))
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.param_groups[0]["params"].append(first)
    before = first.detach().clone()
    train(model, optimizer, batches(2))
    assert not torch.equal(first, before)
