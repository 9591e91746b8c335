"""The IF-Shampoo oracle with KFAC curvature reproduces the published SINGD (see `singd_notes`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("singd")

from oracles.curvature import kronecker
from oracles.if_shampoo import IFShampooOracle

STEPS, BATCH = 20, 5


def make_network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3, bias=False)).double()


def forward(network: nn.Sequential, step: int) -> dict[nn.Module, tuple[Any, Any]]:
    """Backward pass of an averaged loss; (inputs, output gradients) of each linear layer."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (BATCH,), generator=generator)
    network.zero_grad()
    seen: dict[nn.Module, tuple[Any, Any]] = {}
    for layer in network:
        before, x = x, layer(x)
        x.retain_grad()
        seen[layer] = (before, x)
    nn.functional.cross_entropy(x, targets).backward()
    return {m: (a.detach().numpy(), out.grad.numpy()) for m, (a, out) in seen.items()}


def joined(weight: torch.Tensor, bias: torch.Tensor | None) -> np.ndarray:
    parts = [weight] if bias is None else [weight, bias[:, None]]
    return torch.cat(parts, dim=1).detach().numpy().copy()


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_oracle_with_kfac_curvature_follows_singd(structure: str, alpha: float) -> None:
    from singd.optim.optimizer import SINGD

    theirs, ours = make_network(), make_network()
    rate = 0.02
    optimizer = SINGD(
        theirs,
        lr=0.05,
        momentum=0.9,
        damping=0.1,
        weight_decay=0.02,
        alpha1=alpha,
        lr_cov=rate * (1 - alpha),
        T=2,
        structures=(structure, structure),
    )
    layers = [m for m in ours if isinstance(m, nn.Linear)]
    oracles = {
        m: IFShampooOracle(
            joined(m.weight, m.bias),
            lr=0.05,
            momentum=0.9,
            damping=0.1,
            weight_decay=0.02,
            riemannian_momentum=alpha,
            precond_lr=rate,
            update_every=2,
            factor_norm=None,
            structures=structure,
        )
        for m in layers
    }
    for t in range(STEPS):
        forward(theirs, t)
        optimizer.step()
        seen = forward(ours, t)
        for m in layers:
            a, g = seen[m]
            grads = joined(m.weight.grad, None if m.bias is None else m.bias.grad)
            if m.bias is not None:
                a = np.concatenate([a, np.ones((BATCH, 1))], axis=1)
            inputs, outputs = np.zeros((a.shape[1],) * 2), np.zeros((g.shape[1],) * 2)
            for a_i, g_i in zip(a, g, strict=True):
                inputs += np.outer(a_i, a_i) / BATCH
                outputs += BATCH * np.outer(g_i, g_i)
            new = torch.from_numpy(oracles[m].step(grads, kronecker([outputs, inputs])))
            with torch.no_grad():
                m.weight.copy_(new[:, : m.in_features])
                if m.bias is not None:
                    m.bias.copy_(new[:, -1])
        with torch.no_grad():
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert float((p - q).norm() / q.norm()) < 1e-12
