"""Float32 in halves: exact, nearest, and no part of checkpoints, which are the same everywhere."""

from __future__ import annotations

import copy
import struct

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import rootfree
from kernels.devices import DEVICE
from rootfree.kernels.halves import halves_of, join, joined, pack_, packed, split, write_
from rootfree.shell.checkpoint import StateMismatchError

FINITE = st.floats(width=32, allow_nan=False)


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_halves_of_any_bits_join_to_the_same(patterns):
    numbers = [struct.unpack("<f", struct.pack("<I", n))[0] for n in patterns]
    x = torch.tensor(numbers, dtype=torch.float32)
    again = join(*split(x))
    number = ~x.isnan()
    assert bits(again[number]) == bits(x[number])
    assert torch.equal(again.isnan(), x.isnan())


@given(st.lists(FINITE, min_size=1, max_size=20))
def test_the_upper_half_is_the_nearest_bf16_number(numbers):
    x = torch.tensor(numbers, dtype=torch.float32)
    half, _ = split(x)
    nearest = x.to(torch.bfloat16).double()
    infinite = nearest.isinf()
    assert torch.equal(half[infinite].double(), nearest[infinite])
    off, least = ((t.double() - x.double()).abs()[~infinite] for t in (half, nearest))
    assert torch.equal(off, least)  # the numbers themselves may differ where two are as near


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000])
def test_not_a_number_is_seen_in_the_upper_half(pattern):
    x = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    assert split(x)[0].isnan()


def test_a_state_in_either_form():
    K, started = torch.randn(2, 3, 3), torch.ones(2, dtype=torch.bool)
    upper, lower = split(K)
    whole = {"factor1": K, "started": started, "tangent1": K}
    rest = dict(whole)
    both = pack_([rest])
    assert rest.keys() == {"started", "tangent1"}
    halves = halves_of("factor1", both["factor1"])
    assert torch.equal(halves["upper1"], upper)
    assert torch.equal(halves["lower1"], lower)
    for form in ({**rest, **both}, {**rest, **halves}):
        again = joined(form)
        assert again.keys() == whole.keys()
        assert all(torch.equal(again[key], whole[key]) for key in whole)
    # What was rounded already has no rest to be found again.
    assert pack_([{"factor1": upper, "started": started}]) == {}
    # A state that has no halves is in one piece already.
    assert joined(whole) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_writing_into_either_form(dtype):
    """Into the tensors that are there; wider ones have more than halves hold."""
    K, started = torch.randn(2, 3, 3), torch.ones(2, dtype=torch.bool)
    source = {"block0.factor1": K.to(dtype), "block0.started": started}
    whole = {"block0.factor1": torch.zeros(2, 3, 3), "block0.started": ~started}
    halves = {"block0.factor1": packed(torch.zeros(2, 3, 3)), "block0.started": ~started}
    for state in (whole, halves):
        before = dict(state)
        write_(state, source)
        assert all(state[key] is before[key] for key in before)
        found = joined(state)
        assert torch.equal(found["block0.factor1"], K)
        assert torch.equal(found["block0.started"], started)


OPTIONS = {"batch_size": 8, "block_size": 8, "matmul_dtype": torch.bfloat16}


def trained(fused, steps, **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(6, 10, device=DEVICE))
    optimizer = rootfree.IFShampoo([p], fused=fused, **{**OPTIONS, **options})
    run(optimizer, range(steps))
    return p, optimizer


def run(optimizer, steps):
    (p,) = optimizer.param_groups[0]["params"]
    for i in steps:
        torch.manual_seed(10 + i)
        p.grad = torch.randn_like(p)
        optimizer.step()


def saved_state(optimizer) -> dict[str, torch.Tensor]:
    return optimizer.state_dict()["state"][0]


def is_in_halves(state) -> bool:
    return state["block0.factor0"].dtype == torch.int16


def shapes_of(state) -> dict:
    return {key: (tuple(t.shape), t.dtype) for key, t in state.items()}


def assert_equal(left, right) -> None:
    """States of the same keys, dtypes and bits."""
    assert shapes_of(left) == shapes_of(right)
    assert all(torch.equal(t, right[key]) for key, t in left.items())


def old_form(state_dict):
    """A checkpoint as it was written when halves were in it and groups counted their steps."""
    old = copy.deepcopy(state_dict)
    for state in old["state"].values():
        old["param_groups"][0]["step"] = int(state.pop("step"))
        for key in [key for key in state if "factor" in key]:
            upper, lower = split(state.pop(key))
            state[key.replace("factor", "upper")] = upper
            state[key.replace("factor", "lower")] = lower
    return old


def test_kernels_keep_matrices_in_halves_and_nothing_else_does():
    for fused, options, kept in (
        (True, {}, True),
        (True, {"factor_dtype": torch.float32}, True),
        (True, {"update_rms": 0.2, "nesterov": True}, True),
        (False, {}, False),
        (True, {"factor_dtype": torch.bfloat16}, False),
        (True, {"riemannian_momentum": 0.5}, False),
        (True, {"structure": "diagonal"}, False),
        (True, {"matmul_dtype": torch.float32}, False),
    ):
        p, optimizer = trained(fused, 1, **options)
        assert is_in_halves(optimizer.state[p]) == kept, options
        assert not any("upper" in key or "lower" in key for key in saved_state(optimizer)), options


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"factor_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}, {"momentum": 0.0}],
    ids=["default", "low-memory", "no momentum"],
)
def test_checkpoints_are_alike_with_and_without_kernels(options, steps):
    (_, mine), (_, other) = trained(True, steps, **options), trained(False, steps, **options)
    assert shapes_of(saved_state(mine)) == shapes_of(saved_state(other))
    dtype = options.get("factor_dtype", torch.float32)
    assert saved_state(mine)["block0.factor0"].dtype == dtype
    assert [sorted(g) for g in mine.state_dict()["param_groups"]] == [
        sorted(g) for g in other.state_dict()["param_groups"]
    ]


def test_a_checkpoint_does_not_change_with_the_run():
    """Factors are joined into tensors of their own; the others are the state's, as in torch."""
    _, optimizer = trained(True, 3)
    saved = saved_state(optimizer)
    kept = {key: t.clone() for key, t in saved.items() if "factor" in key}
    run(optimizer, range(3, 5))
    assert kept
    assert all(torch.equal(saved[key], t) for key, t in kept.items())


@pytest.mark.parametrize("form", ["new", "old"])
@pytest.mark.parametrize("source", [True, False])
def test_a_checkpoint_goes_from_one_form_to_the_other_exactly(source, form):
    """Also one that was written when halves were in it."""
    p, optimizer = trained(source, 3)
    q, other = trained(not source, 1)
    storage = [t.data_ptr() for t in other.state[q].values()]
    saved = optimizer.state_dict()
    other.load_state_dict(old_form(saved) if form == "old" else copy.deepcopy(saved))
    assert [t.data_ptr() for t in other.state[q].values()] == storage
    assert_equal(joined(optimizer.state[p]), joined(other.state[q]))
    assert_equal(saved_state(optimizer), saved_state(other))
    assert "step" not in other.param_groups[0]
    assert other.state[q]["step"] == 3
    K = saved_state(other)["block0.factor0"]
    assert not torch.equal(K, K.bfloat16().float())
    # There and back: the run goes on as if nothing had happened.
    r, third = trained(source, 0)
    third.load_state_dict(copy.deepcopy(other.state_dict()))
    with torch.no_grad():
        r.copy_(p)
    run(optimizer, range(3, 6))
    run(third, range(3, 6))
    assert torch.equal(p, r)
    assert_equal(saved_state(optimizer), saved_state(third))


@pytest.mark.parametrize("source", [True, False])
def test_a_flat_checkpoint_goes_from_one_form_to_the_other(source):
    """torch takes the names of what it restores from the state in use."""
    _, optimizer = trained(source, 3)
    q, other = trained(not source, 1)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    models = [model_of(each) for each in (optimizer, other)]
    saved = get_optimizer_state_dict(models[0], optimizer, options=flat)
    assert other.state[q].keys() == saved_state(other).keys()
    set_optimizer_state_dict(models[1], other, copy.deepcopy(saved), options=flat)
    assert_equal(saved_state(optimizer), saved_state(other))


@pytest.mark.parametrize("option", ["full_state_dict", "cpu_offload"])
def test_torchs_functions_take_groups_with_dtypes(option):
    """They know numbers, texts and tensors: a dtype is saved by its name."""
    few = {"state_dtype": torch.bfloat16, "factor_dtype": torch.bfloat16}
    (_, optimizer), (_, other) = trained(False, 2, **few), trained(False, 1, **few)
    options = StateDictOptions(**{option: True})
    saved = get_optimizer_state_dict(model_of(optimizer), optimizer, options=options)
    set_optimizer_state_dict(model_of(other), other, copy.deepcopy(saved), options=options)
    assert {key: other.param_groups[0][key] for key in few} == few
    assert_equal(saved_state(optimizer), saved_state(other))


def model_of(optimizer) -> torch.nn.Module:
    return torch.nn.ParameterList(optimizer.param_groups[0]["params"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"update_rms": 0.2}, {"matmul_dtype": torch.float32}], ids=lambda o: next(iter(o))
)
def test_a_checkpoint_with_other_options_brings_them(options):
    """The kernels run on as in the run that it is of, or the rules."""
    for mine, its in ((options, {}), ({}, options)):
        p, optimizer = trained(True, 3, **its)
        q, other = trained(True, 1, **mine)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with torch.no_grad():
            q.copy_(p)
        for each in (optimizer, other):
            run(each, range(3, 5))
        assert other.state[q].keys() == optimizer.state[p].keys()
        assert torch.equal(p, q)


@pytest.mark.parametrize("fused", [True, False])
def test_a_checkpoint_of_a_float64_model_is_taken_rounded(fused):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(6, 10, device=DEVICE, dtype=torch.float64))
    optimizer = rootfree.IFShampoo([p], **OPTIONS)
    run(optimizer, range(3))
    for steps in (0, 1):
        q, other = trained(fused, steps)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        its = joined(other.state[q])
        for key, t in optimizer.state[p].items():
            assert torch.equal(t.to(its[key].dtype), its[key])


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_checkpoint_with_a_damaged_half_is_refused(fused, damage):
    _, optimizer = trained(True, 3)
    saved = old_form(optimizer.state_dict())
    lower = saved["state"][0].pop("block0.lower0")
    if damage == "cut":
        saved["state"][0]["block0.lower0"] = lower[:, :1]
    q, other = trained(fused, 1)
    before = copy.deepcopy(other.state[q])
    with pytest.raises(StateMismatchError, match="does not fit"):
        other.load_state_dict(saved)
    assert all(torch.equal(t, other.state[q][key]) for key, t in before.items())


CHANGES = {
    "matmul_dtype": torch.float32,
    "update_rms": 0.2,
    "max_update_rms": 0.5,
    "nesterov": True,
    "momentum": 0.5,
    "decoupled_weight_decay": True,
    "precond_lr": 0.3,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fused", [True, False])
def test_options_that_change_between_steps_leave_the_keys(fused, name):
    _, optimizer = trained(fused, 2)
    before = shapes_of(saved_state(optimizer))
    old = optimizer.param_groups[0][name]
    for i, value in enumerate((CHANGES[name], old)):
        optimizer.param_groups[0][name] = value
        assert shapes_of(saved_state(optimizer)) == before
        run(optimizer, range(2 + i, 3 + i))
        assert shapes_of(saved_state(optimizer)) == before


@pytest.mark.parametrize("fused", [True, False])
def test_momentum_that_is_turned_on_adds_its_buffer(fused):
    p, optimizer = trained(fused, 2, momentum=0.0)
    before = shapes_of(saved_state(optimizer))
    assert "momentum" not in before
    optimizer.param_groups[0]["momentum"] = 0.9
    run(optimizer, range(2, 3))
    buffer = {"momentum": ((6, 10), torch.float32)}
    assert shapes_of(saved_state(optimizer)) == {**before, **buffer}
    assert optimizer.state[p]["momentum"].any()
    optimizer.param_groups[0]["momentum"] = 0.0  # turned off again it leaves
    run(optimizer, range(3, 4))
    assert shapes_of(saved_state(optimizer)) == before


def test_the_form_follows_options_that_are_changed_later():
    """With products in fp32 the rules run, and without the kernels again: numbers stay exact."""
    runs = [trained(fused, 0) for fused in (True, False)]
    for _, optimizer in runs:
        optimizer.param_groups[0]["matmul_dtype"] = torch.float32
        run(optimizer, range(3))
    (p, optimizer), (q, other) = runs
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    mine, its = saved_state(optimizer), saved_state(other)
    assert optimizer.state[p].keys() == other.state[q].keys() == its.keys()
    assert all(torch.equal(t, mine[key]) for key, t in its.items() if "factor" in key)
    optimizer.param_groups[0]["matmul_dtype"] = torch.bfloat16
    p.grad = torch.zeros_like(p)
    before = saved_state(optimizer)
    optimizer.step()  # no refresh
    assert is_in_halves(optimizer.state[p])
    after = saved_state(optimizer)
    assert all(torch.equal(t, after[key]) for key, t in before.items() if "factor" in key)


def test_a_copy_without_kernels_has_factors_in_one_piece():
    p, optimizer = trained(True, 3)
    other = copy.deepcopy(optimizer)
    other._fused = False  # as on a machine that has none
    (q,) = other.param_groups[0]["params"]
    before = joined(other.state[q])
    q.grad = torch.zeros_like(q)
    assert not other.refreshes_next
    other.step()
    assert is_in_halves(optimizer.state[p])
    assert all(torch.equal(other.state[q][key], t) for key, t in before.items() if "factor" in key)


def test_a_model_that_is_made_wider_later():
    """The kernels do not know float64: the rules run on factors that are float64 as well."""
    (p, optimizer), (q, other) = trained(True, 3), trained(False, 0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        q.copy_(p)
    for each, its in ((p, optimizer), (q, other)):
        each.data = each.data.double()
        each.grad = None
        run(its, range(3, 5))
    assert torch.equal(p, q)
    assert_equal(optimizer.state[p], other.state[q])


def test_products_may_be_asked_for_in_another_dtype_later():
    (p, optimizer), (q, other) = trained(True, 3), trained(False, 0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        q.copy_(p)
    for each in (optimizer, other):
        each.param_groups[0]["matmul_dtype"] = torch.float32
        run(each, range(3, 5))
    mine = joined(optimizer.state[p])
    assert all(torch.equal(mine[key], t) for key, t in other.state[q].items() if "factor" in key)
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("source", [True, False])
def test_distributed_checkpoints_go_from_one_form_to_the_other_exactly(source, steps, tmp_path):
    """They copy by name into what is there: tensors of `state_dict()`, whole ones."""
    _, optimizer = trained(source, 3)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for fused in (source, not source):
        _, other = trained(fused, steps)
        loaded = {"optimizer": other.state_dict()}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        other.load_state_dict(loaded["optimizer"])
        assert_equal(saved_state(optimizer), saved_state(other))


def test_a_checkpoint_with_packed_factors_is_refused():
    """They are a form of the state in use alone: in a file they are numbers of another kind."""
    p = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = rootfree.IFShampoo([p], batch_size=2)
    saved = optimizer.state_dict()
    saved["state"][0]["block0.factor0"] = torch.full((2, 1, 6, 6), 16256, dtype=torch.int16)
    with pytest.raises(StateMismatchError, match="of a dtype like"):
        optimizer.load_state_dict(saved)
