"""Far from ordinary gradients, in float32: nothing leaves the range, inverses stay inverses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rootfree

D = 6
#: The full-matrix rules of the paper.
BARE = {"momentum": 0.0, "nesterov": False, "safeguard": False}
METHODS: dict[str, Callable[..., Any]] = {
    "RFFullAdagrad": lambda ps, **o: rootfree.RFFullAdagrad(ps, **{**BARE, **o}),
    "IFFullAdagrad-factor": lambda ps, **o: rootfree.IFFullAdagrad(ps, **{**BARE, **o}),
    "IFFullAdagrad-covariance": lambda ps, **o: rootfree.IFFullAdagrad(
        ps, form="covariance", **{**BARE, **o}
    ),
    "RFShampoo": lambda ps, **o: rootfree.RFShampoo(ps, update_every=1, **o),
    "IFShampoo": lambda ps, **o: rootfree.IFShampoo(ps, update_every=1, structure="dense", **o),
}
RANK_ONE = ("RFFullAdagrad", "IFFullAdagrad-covariance")


def finite(optimizer: Any) -> bool:
    tensors = [*optimizer.state, *(t for s in optimizer.state.values() for t in s.values())]
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def gradients(seed: int, *shape: int) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(shape, generator=generator)


@pytest.mark.parametrize("dead", ["all", "a coordinate", "a row"])
@pytest.mark.parametrize("method", METHODS)
def test_what_gets_no_gradient_grows_within_bounds(method, dead):
    """γ = 1 and λ = 0: S decays without limit where nothing comes in; 0.9^1200 is 1e-55."""
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = METHODS[method](
        [p], lr=1e-3, batch_size=32, gamma=1.0, damping=0.0, precond_lr=0.1, momentum=0.0
    )
    draw = gradients(0, 3, 2)
    for _ in range(1200):
        p.grad = draw()
        if dead == "all":
            p.grad.zero_()
        elif dead == "a coordinate":
            p.grad[1, 1] = 0.0
        else:
            p.grad[1] = 0.0
        optimizer.step()
    assert finite(optimizer)
    # and it comes back: the first gradient there is neither lost nor the end
    p.grad = draw()
    optimizer.step()
    assert finite(optimizer)


@pytest.mark.parametrize("damping", [0.0, 1e-4])
@pytest.mark.parametrize("precond_lr", [0.1, 0.5])
def test_the_covariance_form_survives_a_huge_gradient_after_tiny_ones(precond_lr, damping):
    """S⁻¹ has grown for 400 steps, then the curvature is 10²⁶ times what it was."""
    p = nn.Parameter(torch.zeros(D))
    optimizer = METHODS["IFFullAdagrad-covariance"](
        [p],
        lr=1e-3,
        batch_size=32,
        gamma=1.0,
        precond_lr=precond_lr,
        damping=damping,
        max_update_rms=1.0,
    )
    draw = gradients(0, D)
    for _ in range(400):
        p.grad = 1e-6 * draw()
        optimizer.step()
    assert finite(optimizer)
    for _ in range(20):
        p.grad = 1e7 * draw()
        optimizer.step()
        assert finite(optimizer)
    (S_inv,) = optimizer.state[p]["block0.inverse"]
    assert (S_inv.diagonal() > 0).all()


@pytest.mark.parametrize("precond_lr", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("method", RANK_ONE)
def test_rank_one_updates_keep_the_inverse_symmetric_and_positive_definite(method, precond_lr):
    """γ = 1: rounding makes the two halves differ, and nothing damps the difference."""
    p = nn.Parameter(torch.zeros(16))
    optimizer = METHODS[method](
        [p], lr=1e-3, batch_size=32, gamma=1.0, damping=0.0, precond_lr=precond_lr
    )
    draw = gradients(0, 16)
    for _ in range(400):
        p.grad = draw()
        optimizer.step()
        (S_inv,) = optimizer.state[p]["block0.inverse"].double()
        size = S_inv.diagonal().clamp(min=0).sqrt()
        assert (size > 0).all()
        # relative to the diagonal: the scale of a coordinate is nobody's business
        unit = S_inv / size[:, None] / size
        assert (unit - unit.T).abs().max() < 1e-4
    assert torch.linalg.eigvalsh((unit + unit.T) / 2)[0] > 0


@pytest.mark.parametrize("method", RANK_ONE)
def test_float64_shows_what_float32_should_be(method):
    """The guards are for rounding alone: they change no ordinary trajectory."""
    found = []
    for dtype in (torch.float32, torch.float64):
        p = nn.Parameter(torch.zeros(4, dtype=dtype))
        optimizer = METHODS[method](
            [p], lr=1e-2, batch_size=4, gamma=1.0, damping=0.0, precond_lr=0.1
        )
        draw = gradients(0, 4)
        for _ in range(100):
            p.grad = draw().to(dtype)
            optimizer.step()
        found.append(p.detach().double())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_as_many_elements_as_the_window_has_steps():
    """γ = 1 and β₂ = 0.1: (1 - β₂)^128 is 1e-6; in fp64 the parameter stays below 1e-3."""
    p = nn.Parameter(torch.zeros(128))
    optimizer = METHODS["RFFullAdagrad"]([p], lr=1e-3, batch_size=32, gamma=1.0, precond_lr=0.1)
    draw = gradients(0, 128)
    for _ in range(400):
        p.grad = draw()
        optimizer.step()
    (S_inv,) = optimizer.state[p]["block0.inverse"].double()
    assert p.abs().max() < 1e-2  # found: 9e7
    root = S_inv.diagonal().sqrt()
    assert torch.linalg.eigvalsh(S_inv / root[:, None] / root)[0] > -1e-5


@pytest.mark.parametrize("precond_lr", [0.5, 0.9])
def test_more_elements_than_float64_remembers(precond_lr):
    """γ = 1, λ = 0: (1 - β₂)^64 is below 1e-19, and S singular up to rounding."""
    p = nn.Parameter(torch.zeros(64))
    optimizer = METHODS["RFFullAdagrad"](
        [p], lr=1e-3, batch_size=32, gamma=1.0, damping=0.0, precond_lr=precond_lr
    )
    draw = gradients(0, 64)
    for _ in range(200):
        p.grad = draw()
        optimizer.step()
        (S_inv,) = optimizer.state[p]["block0.inverse"]
        root = S_inv.diagonal().sqrt()
        assert torch.linalg.eigvalsh(S_inv / root[:, None] / root)[0] > 0
