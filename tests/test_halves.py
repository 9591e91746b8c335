"""Float32 in halves: exact, nearest, and the same in checkpoints whichever way factors are kept."""

from __future__ import annotations

import copy
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rootfree
from kernels.devices import DEVICE
from rootfree.checkpoint import StateMismatchError
from rootfree.halves import join, joined, kept_like, split

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


def test_a_state_in_the_form_of_another():
    K, started = torch.randn(2, 3, 3), torch.ones(2, dtype=torch.bool)
    upper, lower = split(K)
    whole = {"block0.factor1": K, "block0.started": started}
    halves = {"block0.upper1": upper, "block0.lower1": lower, "block0.started": started}
    assert kept_like(whole, whole) is whole
    assert kept_like(halves, halves) is halves
    for state in (kept_like(halves, whole), joined(halves)):
        assert state.keys() == whole.keys()
        assert torch.equal(state["block0.factor1"], K)
    state = kept_like(whole, halves)
    assert state.keys() == halves.keys()
    assert all(torch.equal(state[key], halves[key]) for key in halves)
    # What was rounded already has no rest to be found again.
    rounded = {**whole, "block0.factor1": upper}
    assert kept_like(rounded, halves).keys() == whole.keys()
    # Wider ones have more than halves hold.
    wide = kept_like({**whole, "block0.factor1": K.double()}, halves)
    assert all(torch.equal(wide[key], halves[key]) for key in halves)


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


def test_kernels_keep_matrices_in_halves_and_nothing_else_does():
    for fused, options, kept in (
        (True, {}, True),
        (True, {"factor_dtype": torch.float32}, True),
        (False, {}, False),
        (True, {"update_rms": 0.2}, False),
        (True, {"factor_dtype": torch.bfloat16}, False),
        (True, {"riemannian_momentum": 0.5}, False),
        (True, {"structure": "diagonal"}, False),
        (True, {"matmul_dtype": torch.float32}, False),
    ):
        p, optimizer = trained(fused, 1, **options)
        assert ("block0.upper0" in optimizer.state[p]) == kept, options


@pytest.mark.slow
@pytest.mark.parametrize("source", [True, False])
def test_a_checkpoint_goes_from_one_form_to_the_other_exactly(source):
    """Also one that was written before there were halves."""
    p, optimizer = trained(source, 3)
    q, other = trained(not source, 0)
    storage = [t.data_ptr() for t in other.state[q].values()]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [t.data_ptr() for t in other.state[q].values()] == storage
    mine, its = joined(optimizer.state[p]), joined(other.state[q])
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[key], its[key]) for key in mine)
    assert not torch.equal(mine["block0.factor0"], mine["block0.factor0"].bfloat16().float())
    # There and back: the run goes on as if nothing had happened.
    r, third = trained(source, 0)
    third.load_state_dict(copy.deepcopy(other.state_dict()))
    with torch.no_grad():
        r.copy_(p)
    run(optimizer, range(3, 5))
    run(third, range(3, 5))
    assert torch.equal(p, r)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"update_rms": 0.2}, {"matmul_dtype": torch.float32}], ids=lambda o: next(iter(o))
)
def test_a_checkpoint_with_other_options_brings_its_form(options):
    """The kernels run on as in the run that it is of, or the rules."""
    for mine, its in ((options, {}), ({}, options)):
        p, optimizer = trained(True, 3, **its)
        q, other = trained(True, 1, **mine)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert other.state[q].keys() == optimizer.state[p].keys()
        with torch.no_grad():
            q.copy_(p)
        for each in (optimizer, other):
            run(each, range(3, 5))
        assert torch.equal(p, q)


@pytest.mark.parametrize("fused", [True, False])
def test_a_checkpoint_of_a_float64_model_is_taken_rounded(fused):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(6, 10, device=DEVICE, dtype=torch.float64))
    optimizer = rootfree.IFShampoo([p], **OPTIONS)
    run(optimizer, range(3))
    q, other = trained(fused, 0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    its = joined(other.state[q])
    assert all(torch.equal(t.to(its[key].dtype), its[key]) for key, t in optimizer.state[p].items())


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_checkpoint_with_a_damaged_half_is_refused(fused, damage):
    _, optimizer = trained(True, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    lower = saved["state"][0].pop("block0.lower0")
    if damage == "cut":
        saved["state"][0]["block0.lower0"] = lower[:, :1]
    q, other = trained(fused, 1)
    before = copy.deepcopy(other.state[q])
    with pytest.raises(StateMismatchError, match="does not fit"):
        other.load_state_dict(saved)
    assert all(torch.equal(t, other.state[q][key]) for key, t in before.items())


def test_the_form_follows_options_that_are_changed_later():
    """With update_rms the rules run, and without it the kernels again."""
    runs = [trained(fused, 0) for fused in (True, False)]
    for _, optimizer in runs:
        optimizer.param_groups[0]["update_rms"] = 0.2
        run(optimizer, range(3))
    (p, optimizer), (q, other) = runs
    assert torch.equal(p, q)
    assert optimizer.state[p].keys() == other.state[q].keys()
    assert all(torch.equal(t, other.state[q][key]) for key, t in optimizer.state[p].items())
    optimizer.param_groups[0]["update_rms"] = None
    run(optimizer, range(3, 4))
    assert "block0.upper0" in optimizer.state[p]


def test_a_copy_without_kernels_has_factors_in_one_piece():
    p, optimizer = trained(True, 3)
    other = copy.deepcopy(optimizer)
    other._kernels = {}  # as on a machine that has none
    (q,) = other.param_groups[0]["params"]
    before = joined(other.state[q])
    q.grad = torch.zeros_like(q)
    other.param_groups[0]["step"] = 1  # no refresh
    other.step()
    assert "block0.upper0" in optimizer.state[p]
    assert all(torch.equal(other.state[q][key], t) for key, t in before.items() if "factor" in key)


def test_a_model_that_is_made_wider_later():
    """The kernels do not know float64: the rules run on halves, which float64 does not change."""
    (p, optimizer), (q, other) = trained(True, 3), trained(False, 0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        q.copy_(p)
    for each, its in ((p, optimizer), (q, other)):
        each.data = each.data.double()
        each.grad = None
        run(its, range(3, 5))
    assert torch.equal(p, q)
    mine = joined(optimizer.state[p])
    assert all(torch.equal(mine[key], t) for key, t in other.state[q].items() if "factor" in key)


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


@pytest.mark.parametrize("source", [True, False])
def test_distributed_checkpoints_never_take_one_form_for_the_other(source, tmp_path):
    """They copy by name into what is there, and would round fp32 factors to their upper halves."""
    import torch.distributed.checkpoint as dcp

    p, optimizer = trained(source, 3)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    q, same = trained(source, 0)
    loaded = {"optimizer": same.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    same.load_state_dict(loaded["optimizer"])
    assert all(torch.equal(t, same.state[q][key]) for key, t in optimizer.state[p].items())
    _, other = trained(not source, 0)
    missing = "factor0" if source else "upper0"
    with pytest.raises(dcp.CheckpointException, match=f"Missing key.*{missing}"):
        dcp.load({"optimizer": other.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
