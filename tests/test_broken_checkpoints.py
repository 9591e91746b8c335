"""Checkpoints that are wrong in any way: loaded as a whole, or refused with nothing changed."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rootfree
from conformance.problems import groups_without_params
from rootfree.shell.checkpoint import StateMismatchError
from rootfree.shell.companion import AdamW
from rootfree.shell.options import OF_SOME_METHOD

MAKE = {
    "RFRMSprop": lambda ps: rootfree.RFRMSprop(ps, batch_size=4),
    "RFAdamW-tensor-lr": lambda ps: rootfree.RFAdamW(ps, lr=torch.tensor(0.1), batch_size=4),
    "RFFullAdagrad": lambda ps: rootfree.RFFullAdagrad(ps, batch_size=4),
    "RFShampoo": lambda ps: rootfree.RFShampoo(ps, batch_size=4),
    "IFShampoo": lambda ps: rootfree.IFShampoo(ps, batch_size=4),
    "IFWhitening": lambda ps: rootfree.IFWhitening(ps),
    "companion": lambda ps: rootfree.IFShampoo(
        [{"params": ps[:1]}, {"params": ps[1:], "companion": "adamw"}], batch_size=4
    ),
}
every_method = pytest.mark.parametrize("method", MAKE)


def made(method: str, steps: int = 2, seed: int = 0):
    torch.manual_seed(seed)
    ps = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
    optimizer = MAKE[method](ps)
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


def contents(optimizer) -> list[Any]:
    """All that loading may change, as values."""
    rows = [
        (str(key) if isinstance(key, str) else i, sorted((k, _value(v)) for k, v in row.items()))
        for i, (key, row) in enumerate(optimizer.state.items())
    ]
    groups = groups_without_params(optimizer)
    return [rows, [sorted((k, _value(v)) for k, v in g.items()) for g in groups]]


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.tolist()}"
    return repr(value)


def refused(optimizer, saved, match: str = "", error=ValueError) -> None:
    before = contents(optimizer)
    with pytest.raises(error, match=match):
        optimizer.load_state_dict(saved)
    assert contents(optimizer) == before


def last_row(saved: dict) -> dict:
    return saved["state"][max(saved["state"])]


def some_key(row: dict) -> str:
    return next(key for key in row if key != "step")


BAD_VALUES = {
    "an array": (lambda t: t.numpy(), "must be a tensor, got ndarray"),
    "a list": (lambda t: t.tolist(), "must be a tensor, got list"),
    "complex": (lambda t: t.to(torch.complex64), "complex"),
    "integers": (lambda t: t.to(torch.int32), "must be of a dtype like"),
    "NaN": (lambda t: torch.full_like(t, math.nan), "not finite"),
    "infinite": (lambda t: torch.full_like(t, math.inf), "not finite"),
    "sparse": (lambda t: t.to_sparse(), "dense tensor"),
    "of eight bits": (lambda t: t.to(torch.float8_e4m3fn), "dense tensor"),
    "without numbers": (lambda t: t.to("meta"), "dense tensor"),
    "another shape": (lambda t: t.unsqueeze(0), "does not fit"),
    "too large": (lambda t: (t.double() + 10) * 1e300, "beyond the range of torch.float32"),
}


@pytest.mark.parametrize("what", BAD_VALUES)
@every_method
def test_a_bad_value_in_the_last_row_changes_nothing(method, what):
    """The first rows are fine: they used to be overwritten before the last was looked at."""
    change, message = BAD_VALUES[what]
    saved = copy.deepcopy(made(method, seed=1).state_dict())
    row = last_row(saved)
    key = some_key(row)
    row[key] = change(row[key])
    refused(made(method), saved, message, StateMismatchError)


@every_method
def test_state_that_requires_gradients_is_taken_without(method):
    """Copying failed for the views that blocks are kept in, after other rows were overwritten."""
    source, optimizer = made(method, seed=1), made(method)
    saved = copy.deepcopy(source.state_dict())
    for tensor in [t for row in saved["state"].values() for t in row.values()]:
        tensor.requires_grad_(tensor.is_floating_point())
    optimizer.load_state_dict(saved)
    assert contents(optimizer) == contents(source)
    assert not any(t.requires_grad for row in optimizer.state.values() for t in row.values())


IMPOSSIBLE = [
    ("RFRMSprop", "preconditioner", -1, "must not be negative"),
    ("RFFullAdagrad", "block0.inverse", -1, "must be positive definite"),
    ("RFShampoo", "block0.inverse0", -1, "must be positive definite"),
    ("RFShampoo", "block0.factor0", -1, "must be positive definite"),
    ("IFWhitening", "block0.mean_square", -1, "must not be negative"),
    ("companion", "exp_avg_sq", -1, "must not be negative"),
    ("IFShampoo", "step", -1, "must not be negative"),
    ("IFShampoo", "step", 0.75, "must be a whole number"),
    ("IFShampoo", "block0.factor0", 0, "must not be zero"),
]


@pytest.mark.parametrize(("method", "key", "times", "message"), IMPOSSIBLE)
def test_what_no_step_could_have_left(method, key, times, message):
    saved = copy.deepcopy(made(method).state_dict())
    last_row(saved)[key] = last_row(saved)[key] * times
    refused(made(method), saved, message)


def test_factors_without_a_sign_are_taken_with_any():
    saved = copy.deepcopy(made("IFShampoo").state_dict())
    last_row(saved)["block0.factor0"].neg_()  # (-K)(-K)ᵀ = KKᵀ
    made("IFShampoo").load_state_dict(saved)


BAD_GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "step": ({"step": "x"}, "step must be a count"),
    "negative step": ({"step": -1}, "step must be a count"),
    "misspelt": ({"weight_decai": 0.1}, "did you mean 'weight_decay'"),
    "out of range": ({"weight_decay": -1.0}, "weight_decay must be in"),
    "names": ({"param_names": ["w"] * 7}, "must be . names"),
    "params": ({"params": None}, "no list 'params'"),
    "twice": ({"params": [0, 0]}, "every parameter once"),
}


@pytest.mark.parametrize("what", BAD_GROUPS)
@pytest.mark.parametrize("method", ["RFAdamW-tensor-lr", "IFShampoo"])
def test_a_bad_group_changes_nothing(method, what):
    values, message = BAD_GROUPS[what]
    saved = copy.deepcopy(made(method, seed=1).state_dict())
    saved["param_groups"][-1].update(values)
    refused(made(method), saved, message)


def test_options_of_other_methods_are_told_and_those_of_nobody_kept():
    saved = copy.deepcopy(made("RFRMSprop", seed=1).state_dict())
    saved["param_groups"][-1].update({"max_update_rms": "x", "lr_scale": 0.5, "max_lr": 1.0})
    optimizer = made("RFRMSprop")
    with pytest.warns(UserWarning, match="max_update_rms = 'x', an option that RFRMSprop does not"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[-1]["lr_scale"] == 0.5
    optimizer.step()  # nothing has read it
    known = [*rootfree.RootFreeOptimizer.__subclasses__(), AdamW]
    known += [method for each in known[:-1] for method in each.__subclasses__()]
    methods = [method for method in known if "rootfree" in method.__module__]
    assert {name for m in methods for name in m.options} - {"companion"} == OF_SOME_METHOD


@pytest.mark.parametrize("companion", [False, True])
def test_keys_of_schedulers_come_back_without_a_word(companion):
    """OneCycleLR sets the momentum of all groups; those of AdamW have none."""

    def fresh():
        layer = nn.Linear(3, 2)
        groups = [{"params": [layer.weight]}, {"params": [layer.bias]}]
        if companion:
            groups[1]["companion"] = "adamw"
        return rootfree.IFShampoo(groups, batch_size=4)

    source = fresh()
    torch.optim.lr_scheduler.OneCycleLR(source, max_lr=0.1, total_steps=10)
    saved = copy.deepcopy(source.state_dict())
    optimizer = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved)
    assert [group["max_lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert [group["momentum"] for group in optimizer.param_groups] == [0.95, 0.95]


@every_method
def test_options_that_the_checkpoint_leaves_out_stay(method):
    """A missing lr failed with a tensor learning rate, after the state was overwritten."""
    source, optimizer = made(method, seed=1), made(method)
    saved = copy.deepcopy(source.state_dict())
    lrs = [copy.deepcopy(group["lr"]) for group in optimizer.param_groups]
    for group in saved["param_groups"]:
        del group["lr"]
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == lrs
    assert contents(optimizer)[0] == contents(source)[0]


def test_a_step_size_of_another_shape():
    optimizer = made("RFAdamW-tensor-lr")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = torch.tensor([0.5])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.5)


def named(*names: str):
    shapes = {"a": (2, 2), "b": (2, 2), "c": (2, 2), "module.a": (2, 2)}
    return rootfree.RFRMSprop(
        [(n, nn.Parameter(torch.ones(shapes[n]))) for n in names], batch_size=1
    )


def mark(optimizer) -> None:
    for i, row in enumerate(optimizer.state.values()):
        row["preconditioner"].fill_(i + 1)


def marks(optimizer) -> list[float]:
    return [row["preconditioner"].mean().item() for row in optimizer.state.values()]


def test_parameters_in_another_order_are_matched_by_name():
    source, optimizer = named("a", "b", "c"), named("c", "a", "b")
    mark(source)
    optimizer.load_state_dict(source.state_dict())
    assert marks(optimizer) == [3, 1, 2]
    assert optimizer.param_groups[0]["param_names"] == ["c", "a", "b"]


def test_other_names_are_matched_by_position_unless_a_name_says_otherwise():
    source = named("a", "b")
    mark(source)
    wrapped = named("module.a", "b")
    wrapped.load_state_dict(source.state_dict())
    assert marks(wrapped) == [1, 2]
    refused(named("b", "c"), source.state_dict(), "b is number 1 there and 0 here")


def test_a_name_in_another_group_is_refused():
    """Shapes are alike: by position, each would get what belongs to the other."""
    made_of = [(name, nn.Parameter(torch.ones(3))) for name in ("a", "b")]
    groups = [{"params": [pair]} for pair in made_of]
    saved = rootfree.RFRMSprop(groups, batch_size=4).state_dict()
    optimizer = rootfree.RFRMSprop(
        [{"params": [(name, nn.Parameter(torch.ones(3)))]} for name in ("b", "a")], batch_size=4
    )
    refused(optimizer, saved, "parameter b is in group 1 of the checkpoint and in group 0")


def test_names_survive_in_an_optimizer_without_names():
    source = named("a", "b")
    optimizer = rootfree.RFRMSprop([nn.Parameter(torch.ones(2, 2)) for _ in range(2)], batch_size=1)
    optimizer.load_state_dict(source.state_dict())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["a", "b"]


@every_method
def test_entries_of_wrappers_are_kept(method):
    """Lookahead and SAM keep tensors with a parameter, TRAC an entry of its own."""
    source = made(method)
    for group in source.param_groups:
        for p in group["params"]:
            source.state[p]["slow_weights"] = p.detach().clone()
            source.state[p]["pulls"] = 3
    source.state["trac"] = {"betas": torch.tensor([0.9, 0.99]), "n": 2}
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    optimizer = made(method, steps=1, seed=1)
    optimizer.load_state_dict(torch.load(file))
    assert contents(optimizer) == contents(source)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    again = optimizer.state_dict()["state"]
    assert again["trac"]["n"] == 2
    assert again[0]["pulls"] == 3


def test_state_of_a_parameter_that_is_in_no_group():
    saved = copy.deepcopy(made("RFRMSprop").state_dict())
    saved["state"][9] = saved["state"][0]
    refused(made("RFRMSprop"), saved, "state for 9, which is in no group")


@pytest.mark.parametrize(
    "saved", [None, [], 3, {"state": 3, "param_groups": []}, {"state": {}, "param_groups": "x"}]
)
def test_things_that_are_no_checkpoint(saved):
    optimizer = made("RFRMSprop")
    before = contents(optimizer)
    with pytest.raises((ValueError, TypeError)):
        optimizer.load_state_dict(saved)
    assert contents(optimizer) == before


# -- fuzzed ----------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
numbers = st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, 1e-30, 3e38])
tensors = st.builds(
    lambda shape, value, dtype: torch.full(shape, value).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    numbers,
    st.sampled_from(DTYPES),
)
anything = st.one_of(
    tensors,
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    numbers,
    st.text(max_size=5),
    st.builds(list, st.lists(st.integers(0, 3), max_size=3)),
    st.just(np.zeros(2)),
)


@st.composite
def damages(draw):
    """What to do to a checkpoint: a path into it, and a value to put there or nothing."""
    where = draw(st.sampled_from(["row", "group", "state", "top"]))
    return (
        where,
        draw(st.integers(0, 30)),
        draw(st.booleans()),
        draw(st.text(max_size=4)),
        draw(anything),
    )


def damage(saved: dict, plan) -> None:
    where, number, delete, name, value = plan
    rows, groups = saved.get("state"), saved.get("param_groups")
    target: Any = saved
    if where == "row" and isinstance(rows, dict) and rows:
        target = list(rows.values())[number % len(rows)]
    elif where == "group" and isinstance(groups, list) and groups:
        target = groups[number % len(groups)]
    elif where == "state":
        target = rows
    if not isinstance(target, dict):
        return
    keys = list(target)
    key = name if not keys or number % 5 == 0 else keys[number % len(keys)]
    if delete:
        target.pop(key, None)
    else:
        target[key] = value


def loads_or_refuses(optimizer, saved) -> None:
    """Either all of it is there afterwards, or nothing has changed."""
    before = contents(optimizer)
    try:
        optimizer.load_state_dict(saved)
    except (ValueError, TypeError):
        assert contents(optimizer) == before
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            row = optimizer.state[p]
            ours = [
                t for key, t in row.items() if key.startswith("block") or key == "preconditioner"
            ]
            assert all(bool(t.isfinite().all()) for t in ours)
            p.grad = torch.ones_like(p)
    optimizer.step()


@settings(max_examples=150)
@given(method=st.sampled_from(list(MAKE)), plans=st.lists(damages(), min_size=1, max_size=3))
def test_any_damage_is_refused_as_a_whole(method, plans):
    saved = copy.deepcopy(made(method, steps=1, seed=1).state_dict())
    for plan in plans:
        damage(saved, plan)
    loads_or_refuses(made(method, steps=1), saved)


@settings(max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_files(where, byte, cut):
    """One byte is another, or the file ends there; torch.load runs no code of the file."""
    file = io.BytesIO()
    torch.save(made("IFShampoo", steps=1, seed=1).state_dict(), file)
    data = bytearray(file.getvalue())
    place = int(where * len(data))
    data[place] = byte
    try:
        saved = torch.load(io.BytesIO(bytes(data[:place] if cut else data)))
    except Exception:
        return
    loads_or_refuses(made("IFShampoo", steps=1), saved)
