"""Zero initialisation and the missing B are what they say, and stay so."""

from __future__ import annotations

import pytest
import torch

import rootfree
from rootfree_lab.baselines import without_batch_size, zero_initialised

OURS = [getattr(rootfree, name) for name in (
    "RFRMSprop", "RFAdagrad", "RFAdamW", "RFFullAdagrad", "IFFullAdagrad", "RFShampoo",
    "IFShampoo")]  # fmt: skip


def steps(optimizer, p, count: int = 4):
    torch.manual_seed(1)
    for _ in range(count):
        # Small, or the normalised step of the inverse-free methods would be all that is seen.
        p.grad = 0.05 * torch.randn_like(p)
        optimizer.step()
    return p.detach()


def parameter():
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(3, 4))


@pytest.mark.parametrize("method", OURS)
def test_no_b_is_batch_size_one(method):
    p, q = parameter(), parameter()
    # With the safeguard B is in the unit of the curvature too, and cancels.
    words = {"safeguard": False} if "safeguard" in method.options else {}
    ablated = without_batch_size(method)([p], batch_size=64, **words)
    ablated.batch_size = 32  # what a training loop may do
    assert ablated.batch_size == 1
    assert torch.equal(steps(ablated, p), steps(method([q], batch_size=1, **words), q))
    assert not torch.allclose(p, steps(method([r := parameter()], batch_size=64, **words), r))


@pytest.mark.parametrize("method", OURS[:3])
def test_zero_start_of_the_diagonal_methods(method):
    p = parameter()
    words = {"fast_start": False} if "fast_start" in method.options else {}
    ablated = zero_initialised(method)([p], batch_size=2, lr=0.1, max_update=None, **words)
    assert not ablated.state[p]["preconditioner"].any()
    beta2 = 1 - ablated.defaults["betas"][1] if method is rootfree.RFAdamW else (
        ablated.defaults["precond_lr"])  # fmt: skip
    p.grad = torch.full_like(p, 3.0)
    ablated.step()
    # s = 0 + β₂ B g²
    torch.testing.assert_close(
        ablated.state[p]["preconditioner"], torch.full_like(p, beta2 * 2 * 9.0)
    )


def test_zero_start_of_the_full_matrix():
    p = parameter()
    words = {"momentum": 0.0, "precond_lr": 0.1}
    ablated = zero_initialised(rootfree.RFFullAdagrad)(
        [p], batch_size=2, damping=0.1, lr=1.0, **words
    )
    start, g = p.detach().clone(), torch.randn(3, 4)
    p.grad = g.clone()
    ablated.step()
    S = 0.1 * (2 * torch.outer(g.flatten(), g.flatten()) + 0.1 * torch.eye(12))
    expected = start - torch.linalg.solve(S, g.flatten()).view(3, 4)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="cannot start at zero with damping 0"):
        zero_initialised(rootfree.RFFullAdagrad)([parameter()], batch_size=2)


def test_checkpoints_of_an_ablation_are_its_own():
    p = parameter()
    whole = rootfree.RFRMSprop([p], batch_size=2)
    ablated = zero_initialised(rootfree.RFRMSprop)([parameter()], batch_size=2)
    with pytest.raises(ValueError, match="RFRMSprop"):
        ablated.load_state_dict(whole.state_dict())
