"""They optimise: a convex problem, a small network."""

from __future__ import annotations

import pytest
import torch

from conformance.problems import BATCH, batches, network, train

pytestmark = pytest.mark.slow

STEPS = 400


@pytest.fixture(scope="module")
def regression():
    """A noisy, ill-scaled convex problem, and its true minimum."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(512, 6, generator=generator) * torch.logspace(-0.5, 0.5, 6)
    logits = X @ torch.randn(6, 3, generator=generator)
    y = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)

    def loss(W, part=slice(None)):
        return torch.nn.functional.cross_entropy(X[part] @ W, y[part])

    best = torch.zeros(6, 3, requires_grad=True)
    lbfgs = torch.optim.LBFGS([best], max_iter=200)

    def closure():
        lbfgs.zero_grad()
        value = loss(best)
        value.backward()
        return value

    lbfgs.step(closure)
    return loss, loss(best).item()


def test_solves_logistic_regression(row, regression):
    """From mini-batches."""
    loss, minimum = regression
    generator = torch.Generator().manual_seed(1)
    W = torch.nn.Parameter(torch.zeros(6, 3))
    start = loss(W).item()
    optimizer = row.make([W], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(W, torch.randint(512, (BATCH,), generator=generator)).backward()
        optimizer.step()
        schedule.step()
    assert loss(W).item() - minimum < 0.05 * (start - minimum)


def test_learns_a_small_network(row):
    model = network()
    losses = train(model, row.make(model.parameters()), batches(80))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
