"""What PyTorch asks of each of its own optimizers, asked of every row of the table.

The problem is torch's: a linear map of five numbers to ten. Properties that other files of this
folder hold already are not repeated here.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from conformance.problems import identical, snapshot


class Problem:
    """A weight, a bias, an input; `closure` makes gradients and returns the loss."""

    def __init__(self, layout: str = "contiguous", dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = [(10, 5, 2), (10, 2), (5, 2)]
        drawn = [torch.randn(s, generator=draw, dtype=torch.float32)[..., 0] for s in shapes]
        if layout == "contiguous":
            drawn = [t.contiguous() for t in drawn]
        weight, bias, self.x = (t.to(dtype) for t in drawn)
        self.params = [nn.Parameter(weight), nn.Parameter(bias)]

    def named(self):
        return list(zip(("weight", "bias"), self.params, strict=True))

    def closure(self, optimizer):
        optimizer.zero_grad()
        weight, bias = self.params
        loss = (weight.mv(self.x) + bias).square().sum()
        loss.backward()
        return loss

    def run(self, optimizer, steps: int) -> list[float]:
        return [optimizer.step(lambda: self.closure(optimizer)).item() for _ in range(steps)]


def trained(row, steps: int = 3, **overrides):
    problem = Problem()
    optimizer = row.make(problem.params, **overrides)
    problem.run(optimizer, steps)
    return problem, optimizer


@pytest.mark.parametrize(
    ("layout", "groups"),
    [("strided", "parameters"), ("contiguous", "one lr each"), ("contiguous", "a single group")],
)
def test_it_goes_in_the_right_direction(row, layout, groups):
    problem = Problem(layout)
    weight, bias = problem.params
    lr = row.settings["lr"] / 20  # the loss is a sum
    given = {
        "parameters": [weight, bias],
        "one lr each": [{"params": [weight]}, {"params": [bias], "lr": lr / 2}],
        "a single group": [{"params": [bias], "lr": lr / 2}],
    }[groups]
    before = weight.detach().clone()
    optimizer = row.make(given, lr=lr)
    losses = problem.run(optimizer, 10)
    assert losses[-1] < losses[0]
    assert torch.equal(weight, before) == (groups == "a single group")


def test_a_learning_rate_with_one_axis_equals_the_number(row):
    lr = row.settings["lr"]
    _, number = trained(row)
    _, tensor = trained(row, lr=torch.tensor([lr], dtype=torch.float64))
    for mine, expected in zip(snapshot(tensor), snapshot(number), strict=True):
        # Folding a tensor into other factors may round once more, where numbers are kept in halves.
        tolerance = 0.02 if mine.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def test_a_loaded_checkpoint_stays_as_it_was_and_equal_runs_have_equal_ones(row):
    problem, optimizer = trained(row)
    saved, kept = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))
    other = Problem()
    with torch.no_grad():
        for p, q in zip(other.params, problem.params, strict=True):
            p.copy_(q)
    resumed = row.make(other.params)
    resumed.load_state_dict(saved)
    problem.run(optimizer, 2)
    other.run(resumed, 2)
    assert same_checkpoint(saved, kept)
    assert same_checkpoint(resumed.state_dict(), optimizer.state_dict())


def same_checkpoint(left, right) -> bool:
    rows, others = left["state"], right["state"]
    return (
        left["param_groups"] == right["param_groups"]
        and rows.keys() == others.keys()
        and all(rows[n].keys() == others[n].keys() for n in rows)
        and all(torch.equal(rows[n][key], others[n][key]) for n in rows for key in rows[n])
    )


def test_a_file_that_is_read_without_code_is_the_checkpoint(row):
    _, optimizer = trained(row)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert same_checkpoint(torch.load(file, weights_only=True), optimizer.state_dict())


@pytest.mark.parametrize("names", [(True, False), (False, True)], ids=str)
def test_checkpoints_with_and_without_names(row, names):
    first, second = Problem(), Problem()
    optimizers = []
    for problem, named in zip((first, second), names, strict=True):
        optimizers.append(row.make(problem.named() if named else problem.params))
    first.run(optimizers[0], 3)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    with torch.no_grad():
        for p, q in zip(second.params, first.params, strict=True):
            p.copy_(q)
    first.run(optimizers[0], 2)
    second.run(optimizers[1], 2)
    assert identical(*map(snapshot, optimizers))


def test_older_checkpoints_lack_options(row):
    """Those that torch added late: what is left out stays as it is."""
    problem, optimizer = trained(row)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for name in ("nesterov", "decoupled_weight_decay", "max_update", "max_update_rms"):
            group.pop(name, None)
    before = snapshot(optimizer)
    optimizer.load_state_dict(saved)
    assert identical(before, snapshot(optimizer))
    problem.run(optimizer, 1)


def test_a_step_count_that_is_a_plain_number(row):
    problem, optimizer = trained(row)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = int(state["step"])
    before = snapshot(optimizer)
    optimizer.load_state_dict(saved)
    assert identical(before, snapshot(optimizer))
    problem.run(optimizer, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_checkpoint_for_parameters_of_another_dtype(row, dtype):
    """The state is what it is in an optimizer of that dtype, and goes on from the checkpoint."""
    _, optimizer = trained(row)
    problem = Problem(dtype=dtype)
    other = row.make(problem.params)
    dtypes = [t.dtype for t in snapshot(other)]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [t.dtype for t in snapshot(other)] == dtypes
    problem.run(other, 2)
    assert all(t.isfinite().all() for t in snapshot(other))


def test_zero_gradients_move_nothing(row):
    problem = Problem()
    optimizer = row.make(problem.params, weight_decay=0.0)
    before = [p.detach().clone() for p in problem.params]
    for p in problem.params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.step()
    assert all(map(torch.equal, before, problem.params))


def test_it_can_be_printed_and_copies_have_its_attributes(row):
    _, optimizer = trained(row)
    other = copy.deepcopy(optimizer)
    assert repr(other) == repr(optimizer)
    assert repr(optimizer).startswith(type(optimizer).__name__)
    public = [{name for name in vars(o) if not name.startswith("_")} for o in (optimizer, other)]
    assert public[0] == public[1]


def test_hooks_of_all_optimizers_and_of_one_run_in_order(row):
    problem = Problem()
    optimizer = row.make(problem.params)
    seen: list[str] = []

    def note(text):
        return lambda *_: seen.append(text)

    handles = [
        register_optimizer_step_pre_hook(note("all before")),
        optimizer.register_step_pre_hook(note("before")),
        register_optimizer_step_post_hook(note("all after")),
        optimizer.register_step_post_hook(note("after")),
    ]
    try:
        problem.run(optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    problem.run(optimizer, 1)
    assert seen == ["all before", "before", "after", "all after"]


def test_hooks_of_checkpoints(row):
    """Before and after saving and loading, in order; they may replace what is saved or loaded."""
    _, optimizer = trained(row)
    seen: list[str] = []

    def mark(_, saved):
        seen.append("saved")
        return {**saved, "mark": 1}

    def unmark(_, saved):
        seen.append("loads")
        return {key: value for key, value in saved.items() if key != "mark"}

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("saves"))
    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_pre_hook(unmark)
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["mark"] == 1
    before = snapshot(optimizer)
    optimizer.load_state_dict(saved)
    assert identical(before, snapshot(optimizer))
    assert seen == ["saves", "saved", "first", "loads", "loaded"]


def test_the_default_dtype_does_not_matter(row):
    _, usual = trained(row)
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        _, optimizer = trained(row)
    finally:
        torch.set_default_dtype(old)
    assert identical(snapshot(optimizer), snapshot(usual))


def test_inputs_that_are_errors(row):
    """Of torch's list for all optimizers, those that test_errors.py does not have."""
    p, q = (nn.Parameter(torch.ones(1, 1)) for _ in range(2))
    with pytest.raises(TypeError, match="iterable"):
        row.make(p)
    with pytest.raises(ValueError, match="given twice"):
        row.make([{"params": p}, {"params": p}])
    with pytest.raises(ValueError, match="one floating-point number"):
        row.make([p], lr=torch.tensor([0.001, 0.001]))
    with pytest.raises((TypeError, ValueError), match="name"):
        row.make([("weight", p), q])
    with pytest.raises((TypeError, ValueError), match="name"):
        row.make([{"params": [("weight", p)]}, {"params": [q]}])
