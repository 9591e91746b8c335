"""When the curvature is asked, what is refused, and what a copy or a checkpoint keeps."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rootfree
from conformance.problems import identical, snapshot
from curvature.given import Given, draw
from curvature.runs import ALL_METHODS, BALANCED


@pytest.fixture(params=ALL_METHODS)
def method(request) -> str:
    return request.param


def two_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(s, dtype=torch.float64, generator=generator))
        for s in ((3, 4), (5,))
    ]


def with_gradients(params: list[nn.Parameter], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for p in params:
        p.grad = torch.tensor(0.3 * rng.normal(size=tuple(p.shape)))


def answers(params: list[nn.Parameter], seed: int, kind: str = "kronecker") -> dict[Any, Any]:
    rng = np.random.default_rng(seed)
    return {p: draw(kind, tuple(p.shape), rng) for p in params}


def test_asked_at_the_steps_that_use_it(method):
    params, given = two_parameters(), Given()
    words = dict(BALANCED[method])
    every = 3 if "update_every" in words else 1
    if every > 1:
        words["update_every"] = every
    optimizer = ALL_METHODS[method][0](params, curvature=given, **words)
    for t in range(7):
        given.calls.clear()
        given.batch_sizes.clear()
        given.answers = answers(params, t)
        with_gradients(params, t)
        optimizer.batch_size = t + 1
        optimizer.step()
        refreshes = t % every == 0
        assert given.calls == (["check", "of", "of", "used"] if refreshes else [])
        assert given.batch_sizes == ([t + 1] * 2 if refreshes else [])


def test_asked_for_what_has_a_gradient(method):
    params, given = two_parameters(), Given()
    optimizer = ALL_METHODS[method][0](params, curvature=given, **BALANCED[method])
    optimizer.step()
    assert given.calls == []
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert given.calls == ["check", "of", "used"]


def test_groups_refresh_on_their_own():
    params, given = two_parameters(), Given()
    groups = [{"params": params[:1], "update_every": 2}, {"params": params[1:], "update_every": 3}]
    optimizer = rootfree.IFShampoo(groups, batch_size=1, curvature=given)
    seen = []
    for t in range(5):
        given.calls.clear()
        with_gradients(params, t)
        optimizer.step()
        seen.append(given.calls.count("of"))
    assert seen == [2, 0, 1, 1, 1]


class Refusing(Given):
    """Raises at the last question of a step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def check(self, params: Any) -> None:
        if self.where == "check":
            raise RuntimeError("no backward pass was recorded")

    def of(self, p: Any, *, batch_size: int) -> Any:
        if self.where == "of" and p.dim() == 1:
            raise RuntimeError("the model has changed")
        return super().of(p, batch_size=batch_size)


@pytest.mark.parametrize("where", ["check", "of"])
def test_a_curvature_that_refuses_leaves_everything_as_it_was(method, where):
    params, given = two_parameters(), Refusing("nowhere")
    optimizer = ALL_METHODS[method][0](params, curvature=given, **BALANCED[method])
    given.answers = answers(params, 0)
    with_gradients(params, 0)
    optimizer.step()
    before, groups = snapshot(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    given.where = where
    given.calls.clear()
    with pytest.raises(RuntimeError, match=r"no backward|has changed"):
        optimizer.step()
    assert identical(snapshot(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups
    assert "used" not in given.calls
    given.where = "nowhere"
    optimizer.step()


def test_a_refused_step_leaves_the_counted_batch_alone():
    model, given = nn.Linear(3, 2), Refusing("check")
    optimizer = rootfree.IFShampoo(model.parameters(), curvature=given)
    with rootfree.track_batch_size(model, optimizer, "examples"):
        model(torch.randn(8, 3)).mean().backward()
        with pytest.raises(RuntimeError, match="no backward"):
            optimizer.step()
        given.where = "nowhere"
        optimizer.step()
    assert optimizer.batch_size == 8


WRONG = {
    "type": (torch.ones(3, 4), TypeError, "got Tensor"),
    "rows": (rootfree.SumOfOuterProducts(torch.ones(3, 4)), ValueError, r"shape \(r, 3, 4\)"),
    "diagonal": (rootfree.DiagonalCurvature(torch.ones(4, 3)), ValueError, r"shape \(3, 4\)"),
    "axes": (
        rootfree.KroneckerCurvature((torch.eye(3), torch.eye(5)), (3, 5)),
        ValueError,
        "product 12",
    ),
    "dtype": (
        rootfree.DiagonalCurvature(torch.ones(3, 4, dtype=torch.int64)),
        TypeError,
        "floating",
    ),
    "device": (
        rootfree.DiagonalCurvature(torch.ones(3, 4, device="meta")),
        ValueError,
        "must be on cpu, got meta",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_answers_of_the_wrong_form_are_refused(method, wrong):
    answer, error, message = WRONG[wrong]
    params, given = two_parameters(), Given()
    optimizer = ALL_METHODS[method][0](params, curvature=given, **BALANCED[method])
    before = snapshot(optimizer)
    with_gradients(params, 0)
    given.answers = {params[0]: answer}
    with pytest.raises(error, match=rf"curvature of a parameter of shape \(3, 4\).*{message}"):
        optimizer.step()
    assert identical(snapshot(optimizer), before)


def test_forms_check_themselves():
    with pytest.raises(ValueError, match="2 factors for 1 axes"):
        rootfree.KroneckerCurvature((torch.eye(2), torch.eye(3)), (6,))
    with pytest.raises(ValueError, match=r"factor 1 must have shape \(3, 3\)"):
        rootfree.KroneckerCurvature((torch.eye(2), torch.ones(3, 2)), (2, 3))
    with pytest.raises(ValueError, match="leading axis"):
        rootfree.SumOfOuterProducts(torch.tensor(1.0))


def test_what_is_no_curvature_is_refused(method):
    with pytest.raises(TypeError, match="curvature must have the methods"):
        ALL_METHODS[method][0](two_parameters(), curvature=object(), **BALANCED[method])


# --- checkpoints and copies ---------------------------------------------------------------------


def test_a_checkpoint_knows_nothing_of_the_curvature(method):
    def run(optimizer, params, given, steps):
        for t in steps:
            given.answers = answers(params, t)
            with_gradients(params, t)
            optimizer.step()

    weight, other = two_parameters()
    bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
    params = [weight, bias, other]
    given = Given()
    optimizer = ALL_METHODS[method][0](params, curvature=given, **BALANCED[method])
    run(optimizer, params, given, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)  # the safe default: plain values and tensors only

    twins = [nn.Parameter(p.detach().clone()) for p in params]
    fresh_given = Given()
    fresh = ALL_METHODS[method][0](twins, curvature=fresh_given, **BALANCED[method])
    fresh.load_state_dict(saved)
    run(optimizer, params, given, range(3, 6))
    run(fresh, twins, fresh_given, range(3, 6))
    assert identical(snapshot(optimizer), snapshot(fresh))


def test_a_checkpoint_of_a_joint_pair():
    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        weight = nn.Parameter(torch.randn(3, 4, generator=generator))
        bias = nn.Parameter(torch.randn(3, generator=generator))
        given = Given(joint=[(weight, bias)])
        words = {"batch_size": 1, "update_every": 1, "curvature": given}
        return rootfree.IFShampoo([weight, bias], **words), [weight, bias], given

    def run(optimizer, params, given, steps):
        for t in steps:
            rng = np.random.default_rng(t)
            given.answers = {params[0]: draw("kronecker", (3, 5), rng)}
            for p in params:
                p.grad = torch.tensor(rng.normal(size=tuple(p.shape))).float()
            optimizer.step()

    optimizer, params, given = make(0)
    run(optimizer, params, given, range(3))
    fresh, twins, fresh_given = make(1)
    for p, q in zip(params, twins, strict=True):
        q.data.copy_(p.data)
    fresh.load_state_dict(optimizer.state_dict())
    run(optimizer, params, given, range(3, 6))
    run(fresh, twins, fresh_given, range(3, 6))
    assert identical(snapshot(optimizer), snapshot(fresh))
    # without the pair the factors have other shapes
    plain = rootfree.IFShampoo(twins, batch_size=1)
    with pytest.raises(ValueError, match="does not fit"):
        plain.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_keep_the_curvature(method, how):
    weight, _ = two_parameters()
    bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
    given = Given(joint=[(weight, bias)])
    optimizer = ALL_METHODS[method][0]([weight, bias], curvature=given, **BALANCED[method])
    runs = [(optimizer, weight, bias, given)]
    if how == "deepcopy":
        runs.append(copy.deepcopy(runs[0]))
    else:
        runs.append(pickle.loads(pickle.dumps(runs[0])))
    for each, w, b, curvature in runs:
        curvature.answers = {w: draw("kronecker", (3, 5), np.random.default_rng(0))}
        w.grad, b.grad = torch.ones_like(w), torch.ones_like(b)
        each.step()
        assert curvature.calls == ["check", "of", "used"]
    assert identical(snapshot(runs[0][0]), snapshot(runs[1][0]))
