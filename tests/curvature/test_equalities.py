"""Curvature that says the same thing in another form gives the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rootfree
from curvature.given import KINDS, Given, dense, draw
from curvature.runs import ALL_METHODS, BALANCED
from rules.matrix_runs import AGREES

SHAPES = [(5,), (3, 4), (4, 2, 3)]


@pytest.fixture(params=ALL_METHODS)
def method(request) -> str:
    return request.param


def train(
    method: str, forms: list[Any], steps: int = 8, shape: tuple[int, ...] = (3, 4), **changes: Any
) -> list[torch.Tensor]:
    """Parameters after some steps, one for each form: a function of gradient, rng -> curvature."""
    results = []
    for form in forms:
        rng = np.random.default_rng(0)
        p = nn.Parameter(torch.tensor(rng.normal(size=shape)))
        given = Given() if form is not None else None
        words = {**BALANCED[method], **changes}
        optimizer = ALL_METHODS[method][0]([p], curvature=given, **words)
        for t in range(steps):
            p.grad = torch.tensor(0.3 * rng.normal(size=shape))
            if given is not None:
                given.answers = {p: form(p.grad, np.random.default_rng(t))}
            optimizer.step()
        results.append(p.detach())
    return results


B = 10  # of the balanced settings


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_outer_product_is_the_default(method, shape):
    def one(g, _):
        return rootfree.SumOfOuterProducts(B**0.5 * g[None])

    default, same = train(method, [None, one], shape=shape)
    torch.testing.assert_close(same, default, rtol=1e-14, atol=1e-14)


def test_unknown_everywhere_is_the_default(method):
    default, same = train(method, [None, lambda g, _: None])
    torch.testing.assert_close(same, default, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ["RFRMSprop", "RFAdagrad", "RFAdamW"])
def test_squared_gradients_are_the_default_of_the_diagonal_methods(name):
    def squares(g, _):
        return rootfree.DiagonalCurvature(B * g**2)

    default, same, negative = train(
        name, [None, squares, lambda g, _: rootfree.DiagonalCurvature(-B * g**2)]
    )
    torch.testing.assert_close(same, default, rtol=1e-14, atol=0)
    assert torch.equal(same, negative)  # |h| is used


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "outer"])
@pytest.mark.parametrize("shape", [(3, 4), (4, 2, 3)], ids=str)
def test_the_same_matrix_as_a_sum_of_outer_products(method, kind, shape):
    def itself(g, rng):
        return draw(kind, shape, rng)

    def rows(g, rng):
        values, vectors = np.linalg.eigh(dense(draw(kind, shape, rng)))
        V = (vectors * np.sqrt(values.clip(min=0))).T.copy()
        return rootfree.SumOfOuterProducts(torch.tensor(V).view(-1, *shape))

    left, right = train(method, [itself, rows], shape=shape)
    torch.testing.assert_close(left, right, rtol=10 * AGREES, atol=10 * AGREES)


@pytest.mark.parametrize("method", sorted(set(ALL_METHODS) - {"RFRMSprop", "RFAdagrad", "RFAdamW"}))
def test_forms_may_be_mixed_in_one_stack(method):
    """Eight parameters of one shape share a bucket; each goes on as if it were alone."""
    kinds = [*KINDS, None, "outer", None, "kronecker"]
    make, words = ALL_METHODS[method][0], {**BALANCED[method], "block_size": 3}
    together = [nn.Parameter(torch.full((4, 6), 0.1 * i).double()) for i in range(len(kinds))]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    given = Given()
    optimizers = [make(together, curvature=given, **words)]
    optimizers += [make([p], curvature=given, **words) for p in alone]
    rng = np.random.default_rng(0)
    for t in range(4):
        answers = {}
        for i, (p, q, kind) in enumerate(zip(together, alone, kinds, strict=True)):
            g = torch.tensor(rng.normal(size=(4, 6)))
            H = None if kind is None else draw(kind, (4, 6), rng)
            p.grad, q.grad = (None, None) if i == t else (g, g)  # one is left out at every step
            answers.update({p: H, q: H})
        given.answers = answers
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)


# --- the scale of the loss ----------------------------------------------------------------------


def scale_preconditioner(optimizer: Any, p: torch.Tensor, c: float) -> None:
    """S <- c·S in whatever the method keeps of it."""
    state = optimizer.state[p]
    axes = sum(key.startswith("block0.factor") and key[-1].isdigit() for key in state)
    for key, tensor in state.items():
        name = key.removeprefix("block0.")
        if name == "preconditioner":
            tensor.mul_(c)
        elif name == "inverse" or (name.startswith("inverse") and axes):
            tensor.div_(c ** (1 / max(axes, 1)))
        elif name == "factor" or (name.startswith("factor") and "block0.inverse0" in state):
            tensor.mul_(c ** (1 / max(axes, 1)))
        elif name.startswith("factor"):
            tensor.mul_(c ** (-1 / (2 * axes)))


@pytest.mark.parametrize("kind", KINDS)
def test_averaged_and_summed_losses_give_the_same_steps(method, kind):
    terms, shape = 16, (3, 4)
    results = []
    for average in (True, False):
        c = 1 if average else terms  # the summed loss is `terms` times as large
        p = nn.Parameter(torch.ones(shape, dtype=torch.float64))
        given = Given()
        words = {**BALANCED[method], "batch_size": terms if average else 1}
        words.update(damping=c * 0.3)
        optimizer = ALL_METHODS[method][0]([p], curvature=given, **words)
        scale_preconditioner(optimizer, p, c)
        for t in range(8):
            rng = np.random.default_rng(t)
            each = torch.tensor(0.3 * rng.normal(size=(terms, *shape)))
            p.grad = each.mean(0) * c
            H = draw(kind, shape, rng)
            if kind == "outer":  # the empirical Fisher itself
                H = rootfree.SumOfOuterProducts(each / terms**0.5 * c**0.5)
            elif kind == "diagonal":
                H = rootfree.DiagonalCurvature(c * H.h)
            else:
                H = rootfree.KroneckerCurvature((c * H.factors[0], *H.factors[1:]), H.axes)
            given.answers = {p: H}
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=AGREES, atol=AGREES)


# --- the coordinates ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["outer", "kronecker"])
def test_affine_invariance(kind):
    """RF-Shampoo in W' with W = E W' Fᵀ, from the start that corresponds: the same W."""
    rng = np.random.default_rng(0)
    E, F = (torch.tensor(rng.normal(size=(d, d)) + 2 * np.eye(d)) for d in (3, 4))
    start = torch.tensor(rng.normal(size=(3, 4)))
    W = nn.Parameter(start.clone())
    V = nn.Parameter(torch.linalg.inv(E) @ start @ torch.linalg.inv(F).mT)
    given = Given()
    words = {**BALANCED["RFShampoo"], "damping": 0.0, "weight_decay": 0.0}
    words |= {"factor_norm": None, "init_scale": 1.0}
    one, other = (rootfree.RFShampoo([p], curvature=given, **words) for p in (W, V))
    for n, T in enumerate((E, F)):  # S' = TᵀST
        S = other.state[V][f"block0.factor{n}"]
        S.copy_(T.mT @ S @ T)
        other.state[V][f"block0.inverse{n}"].copy_(torch.linalg.inv(S))
    for _ in range(8):
        G = torch.tensor(0.3 * rng.normal(size=(3, 4)))
        H = draw(kind, (3, 4), rng)
        W.grad, V.grad = G, E.mT @ G @ F
        if kind == "outer":
            turned: Any = rootfree.SumOfOuterProducts(E.mT @ H.V @ F)
        else:
            A, C = H.factors
            turned = rootfree.KroneckerCurvature((E.mT @ A @ E, F.mT @ C @ F), (3, 4))
        given.answers = {W: H, V: turned}
        one.step()
        other.step()
    torch.testing.assert_close(E @ V @ F.mT, W, rtol=1e-10, atol=1e-10)
