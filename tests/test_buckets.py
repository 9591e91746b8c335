"""Many blocks in one call: the same numbers as one by one, and state that stays in its place."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rootfree
from conformance.problems import identical, snapshot
from rootfree.kernels import stack as stacks
from rootfree.kernels.plan import Plan
from rootfree.kernels.stack import Stack
from rootfree.layout.buckets import Bucket, Slot
from rootfree.layout.tiles import pieces_of, tiles_of
from rootfree.rules.momentum import Tail
from rootfree.shell.gradients import memory_of
from rootfree.structures import Dense

SHAMPOO: dict[str, Any] = {"lr": 0.05, "precond_lr": 0.2, "momentum": 0.8, "weight_decay": 0.1}
METHODS: dict[str, Any] = {
    "IFShampoo": lambda ps, **o: rootfree.IFShampoo(
        ps, **{**SHAMPOO, "max_update_rms": None, "riemannian_momentum": 0.5, **o}
    ),
    "IFShampoo-frobenius": lambda ps, **o: rootfree.IFShampoo(
        ps, **{**SHAMPOO, "max_update_rms": None, "factor_norm": "frobenius", **o}
    ),
    "RFShampoo": lambda ps, **o: rootfree.RFShampoo(ps, **{**SHAMPOO, "max_update_rms": None, **o}),
    "RFFullAdagrad": lambda ps, **o: rootfree.RFFullAdagrad(ps, lr=0.1, **o),
    "RFFullAdagrad-damped": lambda ps, **o: rootfree.RFFullAdagrad(ps, lr=0.1, damping=0.1, **o),
    "IFFullAdagrad": lambda ps, **o: rootfree.IFFullAdagrad(ps, lr=0.1, **o),
    "IFFullAdagrad-covariance": lambda ps, **o: rootfree.IFFullAdagrad(
        ps, lr=0.1, form="covariance", damping=0.1, **o
    ),
}

# A batched product may sum in another order than a single one: a few units in the last place of
# float64 a step, ten steps.
SAME = 1e-13


@pytest.fixture(params=METHODS)
def make(request) -> Any:
    return lambda ps, **o: METHODS[request.param](ps, **{"batch_size": 10, **o})


def gradient(seed: int, *shape: int) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=SAME, atol=SAME)


# --- b blocks in one call equal b separate calls -----------------------------------------------


@pytest.mark.parametrize("name", ["IFShampoo", "IFShampoo-frobenius", "RFShampoo"])
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (9,), (5, 4, 6)], ids=str)
def test_a_cut_parameter_equals_one_parameter_per_block(name, shape):
    """Equal blocks and unequal ones (7 = 4 + 3, 5 = 3 + 2)."""
    make = METHODS[name]
    options = {"batch_size": 10, "update_every": 2}
    if name != "RFShampoo":
        options["structure"] = "dense"
    start = gradient(99, *shape)
    whole = nn.Parameter(start.clone())
    optimizer = make([whole], block_size=4, **options)
    tiles = tiles_of(shape, (4,) * len(shape))
    assert sum(t.blocks for t in tiles) > 1
    blocks = {}  # (tile number, index in its grid) -> parameter
    for i, tile in enumerate(tiles):
        for index in np.ndindex(*tile.counts):
            blocks[i, index] = nn.Parameter(tile.grid(start)[index].clone())
    separate = [make([p], block_size=None, **options) for p in blocks.values()]
    for t in range(10):
        g = gradient(t, *shape)
        whole.grad = g
        for (i, index), p in blocks.items():
            p.grad = tiles[i].grid(g)[index].clone()
        for each in (optimizer, *separate):
            each.step()
    for (i, index), p in blocks.items():
        close(tiles[i].grid(whole.detach())[index], p.detach())


def test_many_parameters_equal_one_optimizer_each(make):
    shapes = [(3, 4), (4, 3), (3, 4), (5,), (3, 4), (2, 3, 2), (5,), ()]
    starts = [gradient(i, *s) for i, s in enumerate(shapes)]
    ps = [nn.Parameter(s.clone()) for s in starts]
    qs = [nn.Parameter(s.clone()) for s in starts]
    together, alone = make(ps), [make([q]) for q in qs]
    for t in range(10):
        for i, (p, q) in enumerate(zip(ps, qs, strict=True)):
            p.grad = gradient(100 * t + i, *p.shape)
            q.grad = p.grad.clone()
        for each in (together, *alone):
            each.step()
    for i, (p, q) in enumerate(zip(ps, qs, strict=True)):
        close(p.detach(), q.detach())
        for key, value in together.state[p].items():
            close(value, alone[i].state[q][key])


@pytest.mark.parametrize("threads", [1, 3])
def test_portions_of_a_stack_change_nothing(make, monkeypatch, threads):
    """Seven blocks at once, or one a thread; one member has no gradient at first."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    results = []
    for portion in (stacks.CACHED, 1):
        monkeypatch.setattr(stacks, "CACHED", portion)
        ps = [nn.Parameter(gradient(i, 3, 4)) for i in range(7)]
        optimizer = make(ps, update_every=2)
        for t in range(10):
            for i, p in enumerate(ps):
                p.grad = gradient(100 * t + i, 3, 4) if t > 2 or i != 4 else None
            optimizer.step()
        results.append((ps, optimizer.state))
    (ps, state), (qs, other) = results
    for p, q in zip(ps, qs, strict=True):
        close(p.detach(), q.detach())
        for key, value in state[p].items():
            close(value, other[q][key])


@pytest.mark.parametrize(
    ("blocks", "threads", "rows"),
    [(5, 2, [2, 2, 1]), (12, 2, [12]), (13, 2, [12, 1]), (4, 8, [4])],
)
def test_a_portion_has_as_many_blocks_for_each_thread(monkeypatch, blocks, threads, rows):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    size = 40 if blocks == 5 else 10  # of the larger state, not of the stack
    monkeypatch.setattr(stacks, "CACHED", 60)
    stack = torch.zeros(blocks, 2)
    parts = stacks.rows_at_once(stack, {"factor0": torch.zeros(blocks, size)})
    assert [len(stack[part]) for part in parts] == rows


def test_swapped_members_would_be_seen(make):
    """The comparison above bites: exchanging two gradients changes the result."""
    p, q = nn.Parameter(gradient(0, 3, 4)), nn.Parameter(gradient(0, 3, 4))
    optimizer = make([p, q])
    p.grad, q.grad = gradient(1, 3, 4), gradient(2, 3, 4)
    optimizer.step()
    assert (p - q).abs().max() > 1e-3


# --- members without a gradient ----------------------------------------------------------------


def test_members_without_gradient_are_untouched_and_not_missed(make):
    ps = [nn.Parameter(gradient(i, 3, 4)) for i in range(4)]
    there = [nn.Parameter(p.detach().clone()) for p in ps[1:3]]
    some, only = make(ps), make(there)
    before = {i: (ps[i].detach().clone(), copy.deepcopy(some.state[ps[i]])) for i in (0, 3)}
    for t in range(6):
        for p, q in zip(ps[1:3], there, strict=True):
            p.grad = gradient(t, 3, 4) * (1 + q[0, 0].item())
            q.grad = p.grad.clone()
        some.step()
        only.step()
    for i, (value, state) in before.items():
        assert torch.equal(ps[i], value)
        assert all(torch.equal(some.state[ps[i]][key], state[key]) for key in state)
    for p, q in zip(ps[1:3], there, strict=True):
        close(p.detach(), q.detach())
        for key, value in some.state[p].items():
            close(value, only.state[q][key])
    # and they join when their gradient comes
    ps[0].grad = gradient(7, 3, 4)
    some.step()
    assert not torch.equal(ps[0], before[0][0])


# --- where the state lives ---------------------------------------------------------------------


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [
        nn.Parameter(gradient(i, *s).to(dtype)) for i, s in enumerate([(4, 3)] * 3 + [(6, 5), (4,)])
    ]


def step(optimizer: Any, steps: int = 1, seed: int = 0) -> None:
    for t in range(steps):
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                p.grad = gradient(1000 * seed + 100 * t + i, *p.shape).to(p.dtype)
        optimizer.step()


def block_state(optimizer: Any, p: Tensor) -> dict[str, Tensor]:
    return {k: v for k, v in optimizer.state[p].items() if k.startswith("block")}


def check_views(optimizer: Any) -> None:
    """Every state tensor of a block lies in the slab of its bucket, each in its own place."""
    step(optimizer)
    seen = set()
    for group in optimizer.param_groups:
        for bucket in memory_of(optimizer, group).buckets:
            for name, slab in bucket.slabs.items():
                row = 0
                for slot in bucket.slots:
                    held = optimizer.state[slot.p][slot.prefix + name]
                    assert held.data_ptr() == slab[row:].data_ptr()
                    assert held.shape == (slot.tile.blocks, *slab.shape[1:])
                    row += slot.tile.blocks
                    seen.add((id(slot.p), slot.prefix + name))
                assert row == len(slab)
    held = {
        (id(p), k) for g in optimizer.param_groups for p in g["params"]
        for k in block_state(optimizer, p)
    }  # fmt: skip
    assert seen == held


def slabs_of(optimizer: Any) -> list[Tensor]:
    buckets = memory_of(optimizer, optimizer.param_groups[0]).buckets
    return [slab for bucket in buckets for slab in bucket.slabs.values()]


def test_state_is_made_of_views_of_the_slabs(make):
    optimizer = make(parameters(), block_size=4)
    check_views(optimizer)
    pointers = [slab.data_ptr() for slab in slabs_of(optimizer)]
    step(optimizer, 3)
    assert pointers == [slab.data_ptr() for slab in slabs_of(optimizer)]


def test_state_follows_copies_checkpoints_and_late_groups(make):
    ps = parameters()
    optimizer = make(ps, block_size=4)
    step(optimizer, 2)
    twin = copy.deepcopy(optimizer)
    read = pickle.loads(pickle.dumps(optimizer))
    loaded = make(parameters(), block_size=4)
    step(loaded, 1)
    for p, q in zip(ps, loaded.param_groups[0]["params"], strict=True):
        with torch.no_grad():
            q.copy_(p)
    loaded.load_state_dict(optimizer.state_dict())
    for other in (twin, read, loaded):
        assert identical(snapshot(other), snapshot(optimizer))
        assert not {id(t) for s in other.state.values() for t in s.values()} & {
            id(t) for s in optimizer.state.values() for t in s.values()
        }
        check_views(other)
    step(optimizer)
    for other in (twin, read, loaded):
        assert identical(snapshot(other), snapshot(optimizer))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 3))], "block_size": 4})
    check_views(optimizer)


def test_a_replaced_state_tensor_is_taken_up(make):
    optimizer, untouched = make(parameters()), make(parameters())
    step(optimizer, 2)
    step(untouched, 2)
    for p in optimizer.param_groups[0]["params"][:2]:
        for key in block_state(optimizer, p):
            optimizer.state[p][key] = optimizer.state[p][key].clone()
    step(optimizer, 2, seed=1)
    step(untouched, 2, seed=1)
    assert identical(snapshot(optimizer), snapshot(untouched))
    p = optimizer.param_groups[0]["params"][1]
    for key, held in block_state(optimizer, p).items():
        if key.endswith("growing"):  # while it is true, factors start anew in every step
            held.fill_(False)
            untouched.state[ps_of(untouched)[1]][key].fill_(False)
        if "factor" in key or "inverse" in key:
            optimizer.state[p][key] = 3 * held
    step(optimizer, 1, seed=2)
    step(untouched, 1, seed=2)
    q = untouched.param_groups[0]["params"][1]
    assert not torch.equal(p, q)
    assert torch.equal(ps_of(optimizer)[0], ps_of(untouched)[0])
    check_views(optimizer)


def ps_of(optimizer: Any) -> list[Tensor]:
    return optimizer.param_groups[0]["params"]


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_cast_after_construction_goes_on(make, target):
    """model.bfloat16() or model.double() between two steps: the preconditioner keeps moving."""
    optimizer, kept = make(parameters(), update_every=1), make(parameters(), update_every=1)
    step(optimizer, 2)
    step(kept, 2)
    for p in ps_of(optimizer):
        p.data = p.data.to(target)
        p.grad = None
    step(optimizer, 5, seed=1)
    step(kept, 5, seed=1)
    for p, q in zip(ps_of(optimizer), ps_of(kept), strict=True):
        assert p.dtype == target
        for key in block_state(kept, q):
            if "factor" in key or "inverse" in key:
                found = optimizer.state[p][key]
                # gradients rounded to bf16: eight bits, a few steps
                torch.testing.assert_close(
                    found.float(), kept.state[q][key].float(), rtol=0.05, atol=0.02
                )
    check_views(optimizer)


def test_half_a_model_cast_after_construction_goes_on(make):
    optimizer = make(parameters())
    step(optimizer, 2)
    ps_of(optimizer)[0].data = ps_of(optimizer)[0].data.bfloat16()
    ps_of(optimizer)[0].grad = None
    before = [p.detach().clone() for p in ps_of(optimizer)]
    step(optimizer, 2, seed=1)
    assert all(not torch.equal(p, b) for p, b in zip(ps_of(optimizer), before, strict=True))


# --- checkpoints -------------------------------------------------------------------------------


def through_a_file(state_dict: dict) -> tuple[dict, int]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file), file.getbuffer().nbytes


@pytest.mark.parametrize(
    "other",
    [{"block_size": 2}, {"structure": "diagonal"}, {"structure": ("dense", "lower_triangular")}],
    ids=str,
)
def test_a_checkpoint_of_another_layout_brings_its_layout(other):
    """The checkpoint's options win, and the run resumes bit for bit."""

    def make(**options: Any) -> rootfree.IFShampoo:
        ps = [nn.Parameter(gradient(i, 4, 6).float()) for i in range(3)]
        return rootfree.IFShampoo(ps, lr=0.1, batch_size=10, **options)

    optimizer = make(**other)
    step(optimizer, 4)
    resumed = make(block_size=3)
    step(resumed, 2)
    with torch.no_grad():
        for p, q in zip(ps_of(resumed), ps_of(optimizer), strict=True):
            p.copy_(q)
    saved, _ = through_a_file(optimizer.state_dict())
    resumed.load_state_dict(saved)
    assert resumed.summary() == optimizer.summary()
    step(optimizer, 5, seed=1)
    step(resumed, 5, seed=1)
    assert identical(snapshot(resumed), snapshot(optimizer))
    check_views(resumed)


def test_a_saved_state_dict_is_not_larger_than_the_state(make):
    ps = [nn.Parameter(torch.randn(16, 16)) for _ in range(20)]
    optimizer = make(ps)
    step(optimizer)
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    _, size = through_a_file(optimizer.state_dict())
    # every slab is saved once, however many views it has; entries and names cost a little
    assert size < 1.05 * held + 400 * sum(map(len, optimizer.state.values()))


def test_distributed_checkpoint_keeps_the_factors(make, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))

    model = network()
    optimizer = make(model.parameters())
    step(optimizer, 4)
    dcp.save(
        {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    fresh_model = network()
    fresh = make(fresh_model.parameters())
    loaded = {
        "model": fresh_model.state_dict(),
        "optim": get_optimizer_state_dict(fresh_model, fresh),
    }
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    fresh_model.load_state_dict(loaded["model"])
    set_optimizer_state_dict(fresh_model, fresh, loaded["optim"])
    assert identical(snapshot(fresh), snapshot(optimizer))
    assert {state["step"].item() for state in fresh.state.values()} == {4}
    step(optimizer, 3, seed=1)
    step(fresh, 3, seed=1)
    assert identical(snapshot(fresh), snapshot(optimizer))


# --- gather and scatter ------------------------------------------------------------------------


def bucket_of(ps: list[nn.Parameter]) -> Bucket[Plan]:
    """Parameters (4, 6) in blocks (2, 3), four each; factor0 has the parameter's number in it."""
    (tile,) = tiles_of((4, 6), (2, 3))
    plan = Plan(torch.float64, fused=False, halves=False, direction=None, kernel=None)
    slots = [Slot(p, tile, "block0.", [pieces_of(p, tile)]) for p in ps]
    bucket = Bucket((Dense(2), Dense(3)), plan, slots)
    bucket.adopt([{"factor0": torch.full((4, 2, 2), float(i))} for i in range(len(ps))])
    return bucket


def stack_of(ps: list[nn.Parameter], bucket: Bucket[Plan]) -> Stack:
    """A stack of parameters that are their own gradients."""
    stack = Stack(ps, [bucket], wide=torch.float64)
    stack.gather_([p.detach().clone() for p in ps], squares=False)
    return stack


STEP_OF_ONE = Tail(lr=1.0, alpha1=0.0, kappa=0.0, nesterov=False, decoupled=False)


def test_gather_and_scatter_are_inverse_and_leave_out_who_is_absent():
    ps = [nn.Parameter(gradient(i, 4, 6)) for i in range(3)]
    before = [p.detach().clone() for p in ps]
    stack = stack_of([ps[0], ps[2]], bucket_of(ps))
    (part,) = stack.parts()
    assert part.G.shape == (8, 2, 3)
    assert torch.equal(part.G[1], before[0][:2, 3:])
    assert torch.equal(part.G[4], before[2][:2, :3])
    stack.keep_(part, refresh=False)
    with torch.no_grad():
        stack.descend_([], [], STEP_OF_ONE)  # the direction of each is itself
    assert torch.equal(ps[1], before[1])
    assert all(ps[i].count_nonzero() == 0 for i in (0, 2))


def test_state_of_some_members_is_a_copy_that_is_written_back():
    ps = [nn.Parameter(torch.ones(4, 6, dtype=torch.float64)) for _ in range(3)]
    bucket = bucket_of(ps)
    (part,) = stack_of(ps, bucket).parts()
    assert part.state is bucket.slabs
    for refresh, written in (False, 0.0), (True, 10.0):
        stack = stack_of([ps[0], ps[2]], bucket)
        (part,) = stack.parts()
        held = part.state["factor0"]
        assert held[:, 0, 0].tolist() == [0.0] * 4 + [2.0] * 4
        held += 10
        slab = bucket.slabs["factor0"][:, 0, 0].tolist()
        assert slab == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
        stack.keep_(part, refresh=refresh)
        slab = bucket.slabs["factor0"][:, 0, 0].tolist()
        assert slab == [written] * 4 + [1.0] * 4 + [2.0 + written] * 4
    assert bucket.views()[2]["factor0"][0, 0, 0] == 12


# --- errors ------------------------------------------------------------------------------------


def test_impossible_structures_name_the_parameter_its_shape_and_its_axes():
    p = nn.Parameter(torch.ones(4, 3, 2, 2))
    triple = ("dense", "dense", "diagonal")
    for given, name in ([p], "0"), ([("conv.weight", p)], "conv.weight"):
        with pytest.raises(ValueError, match=rf"parameter {name} of shape \(4, 3, 2, 2\)") as error:
            rootfree.IFShampoo(given, batch_size=1, structure=triple)
        assert "3 axes" in str(error.value)
        assert "(4, 12)" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "densee"}, "structure must be .*did you mean dense"),
        ({"structure": "block_diagonal"}, "block_diagonal:<k> needs an integer"),
        ({"structure": "block_diagonal:0"}, "block_diagonal:<k> needs an integer"),
        ({"structure": "dense:3"}, "dense takes no size"),
        ({"structure": {0: "dense"}}, "number of axes 0"),
        ({"structure": ()}, "structure must be"),
        ({"structure": 3}, "structure must be"),
        ({"block_size": 0}, "block_size must be a positive integer"),
        ({"block_size": 1.5}, "block_size must be a positive integer"),
    ],
    ids=str,
)
def test_impossible_options_name_the_option_and_what_is_allowed(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rootfree.IFShampoo([nn.Parameter(torch.ones(4, 3))], batch_size=1, **options)


def test_a_bad_late_group_changes_nothing():
    optimizer = rootfree.IFShampoo([nn.Parameter(torch.ones(4, 3))], batch_size=1)
    with pytest.raises(ValueError, match=r"parameter w of shape \(5,\)"):
        optimizer.add_param_group(
            {"params": [("w", nn.Parameter(torch.ones(5)))], "structure": ("dense", "dense")}
        )
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.state) == 1
