"""Refreshes are counted for each parameter by the steps that updated it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from conformance.problems import batches, identical, network, snapshot, train
from conformance.rows import ROWS, Row

MATRIX = [row for row in ROWS if "update_every" in row.optimizer.options]


@pytest.fixture(params=MATRIX, ids=lambda row: row.name)
def row(request) -> Row:
    return request.param


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradient(seed: int, p: torch.Tensor) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))


def blocks(optimizer, p) -> list[torch.Tensor]:
    """Copies of the preconditioner's state."""
    state = optimizer.state[p]
    return [t.clone() for key, t in sorted(state.items()) if key.startswith("block")]


def steps(optimizer) -> list[int]:
    return [
        optimizer.state[p]["step"].item()
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def test_every_parameter_counts_its_own_steps(row):
    a, b = parameters((4, 3), (4, 3))
    optimizer = row.make([a, b])
    for t in range(5):
        a.grad = gradient(t, a)
        b.grad = gradient(t, b) if t in (1, 4) else None
        optimizer.step()
    assert steps(optimizer) == [5, 2]
    for p in (a, b):
        count = optimizer.state[p]["step"]
        assert (count.dtype, count.shape, count.device.type) == (torch.int64, (), "cpu")
    assert "step" not in optimizer.param_groups[0]


def test_a_parameter_that_always_misses_the_refreshes_of_the_others_is_preconditioned(row):
    """T = 2, and gradients at odd steps alone: an expert, say, that is used in turn."""
    a, b = parameters((4, 3), (4, 3))
    optimizer = row.make([a, b], update_every=2)
    start = blocks(optimizer, b)
    moved = []
    for t in range(6):
        before = blocks(optimizer, b)
        a.grad = gradient(t, a)
        b.grad = gradient(t, b) if t % 2 else None
        optimizer.step()
        moved.append(not identical(before, blocks(optimizer, b)))
    assert moved == [False, True, False, False, False, True]
    assert not identical(start, blocks(optimizer, b))


def test_groups_that_get_gradients_in_turn_are_both_preconditioned(row):
    a, b = parameters((4, 3), (4, 3))
    optimizer = row.make([{"params": [a]}, {"params": [b]}], update_every=2)
    starts = [blocks(optimizer, p) for p in (a, b)]
    for t in range(4):
        a.grad, b.grad = (gradient(t, a), None) if t % 2 == 0 else (None, gradient(t, b))
        optimizer.step()
    assert steps(optimizer) == [2, 2]
    for p, start in zip((a, b), starts, strict=True):
        assert not identical(start, blocks(optimizer, p))


def test_a_step_without_gradients_counts_nothing(row):
    (p,) = parameters((4, 3))
    optimizer = row.make([p], update_every=2)
    start = blocks(optimizer, p)
    for _ in range(3):
        optimizer.step()
    assert steps(optimizer) == [0]
    p.grad = gradient(0, p)
    optimizer.step()
    assert steps(optimizer) == [1]
    assert not identical(start, blocks(optimizer, p))


@pytest.mark.parametrize("update_every", [2, 3, "logarithmic"])
def test_mixed_counts_in_one_group_equal_separate_optimizers(row, update_every):
    shapes = [(4, 3), (4, 3), (5,), (4, 3), (2, 3, 2)]
    ps, qs = parameters(*shapes), parameters(*shapes)
    together = row.make(ps, update_every=update_every)
    alone = [row.make([q], update_every=update_every) for q in qs]
    for t in range(9):
        for i, (p, q) in enumerate(zip(ps, qs, strict=True)):
            there = (i, t) not in {(1, 0), (2, 1), (3, 0), (3, 3), (4, 4)}
            p.grad = gradient(10 * t + i, p) if there else None
            q.grad = None if p.grad is None else p.grad.clone()
        together.step()
        for optimizer in alone:
            optimizer.step()
    assert steps(together) == [9, 8, 8, 7, 8]
    # Batched products may sum in another order; noise of rounding depends on the place.
    rtol = 2**-5 if "bf16" in row.name else 1e-4
    for p, q, optimizer in zip(ps, qs, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)
        assert together.state[p]["step"] == optimizer.state[q]["step"]
        for mine, theirs in zip(blocks(together, p), blocks(optimizer, q), strict=True):
            if mine.is_floating_point():
                torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)


def test_the_next_refresh_is_told(row):
    a, b = parameters((4, 3), (4, 3))
    optimizer = row.make([{"params": [a]}, {"params": [b]}], update_every=2)
    a.grad = gradient(0, a)
    optimizer.step()
    assert optimizer.refreshes_next  # of b
    b.grad = gradient(0, b)
    a.grad = None
    optimizer.step()
    assert not optimizer.refreshes_next
    optimizer.step()
    assert optimizer.refreshes_next


def as_once(state_dict: dict) -> dict:
    """A checkpoint from when groups counted and there were fewer options."""
    old = copy.deepcopy(state_dict)
    counts = {state.pop("step").item() for state in old["state"].values()}
    (count,) = counts
    for group in old["param_groups"]:
        group["step"] = count
        del group["nesterov"]
        group.pop("decoupled_weight_decay", None)
    return old


@pytest.mark.parametrize("trained", [5, 6])
def test_checkpoints_from_when_groups_counted_load(row, trained):
    """The count goes to every parameter: the next refresh is when it would have been."""
    model, other = network(), network(seed=3)
    optimizer, resumed = (row.make(m.parameters(), update_every=3) for m in (model, other))
    train(model, optimizer, batches(trained))
    train(other, resumed, batches(1))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(as_once(optimizer.state_dict()))
    assert set(steps(resumed)) == {trained}
    assert "step" not in resumed.param_groups[0]
    assert identical(snapshot(resumed), snapshot(optimizer))
    train(model, optimizer, batches(4, seed=2))
    train(other, resumed, batches(4, seed=2))
    assert identical(snapshot(resumed), snapshot(optimizer))
