"""Schedules and losses against slow formulas."""

from __future__ import annotations

import math

import pytest
import torch

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.config.settings import ScheduleConfig, TrainConfig
from rootfree_lab.training.losses import cross_entropy, make_loss, square_loss
from rootfree_lab.training.lr_schedules import Schedule, base_rates, set_rates

EPOCH, TOTAL = 10, 60


def make(**settings):
    return Schedule.make(ScheduleConfig(**settings), total=TOTAL, steps_per_epoch=EPOCH)


def slow(step, name, warmup_epochs=0.0, warmup_share=0.0, milestones=(), factor=0.1, final=0.0):
    """Step by step from the definition, in epochs."""
    warm = round(warmup_epochs * EPOCH) or round(warmup_share * TOTAL)
    if step < warm:
        return (step + 1) / (warm if warmup_share else warm + 1)
    if name == "constant":
        return 1.0
    if name == "step":
        rate = 1.0
        for milestone in milestones:
            if step >= round(milestone * EPOCH):
                rate *= factor
        return rate
    if name == "linear":
        return (TOTAL - step) / (TOTAL - warm) * (1 - final) + final
    # cos² of the half angle: the half-cosine written in another way
    angle = math.pi * (step - warm) / (TOTAL - warm) / 2
    return final + (1 - final) * math.cos(angle) ** 2


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "constant"},
        {"name": "constant", "warmup_epochs": 1.5},
        {"name": "cosine"},
        {"name": "cosine", "warmup_epochs": 2.0, "final": 0.05},
        {"name": "cosine", "warmup_share": 0.1},
        {"name": "linear"},
        {"name": "linear", "warmup_share": 0.25, "final": 0.05},
        {"name": "step", "milestones": (2.0, 3.5)},
        {"name": "step", "milestones": (1.0, 2.0, 5.9), "factor": 0.5, "warmup_epochs": 0.5},
    ],
)
def test_schedules(settings):
    schedule = make(**settings)
    for step in range(TOTAL):
        assert schedule(step) == pytest.approx(slow(step, **settings), rel=1e-12)


def test_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match=r"warmup_epochs.*6 epochs, got 6"):
        make(name="cosine", warmup_epochs=6.0)
    with pytest.raises(ValueError, match=r"warmup_share goes without schedule\.warmup_epochs"):
        make(name="cosine", warmup_epochs=1.0, warmup_share=0.1)


def test_rates_of_all_groups_scale_and_tensors_stay():
    a, b, c = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    rate = torch.tensor(0.25)
    optimizers = [
        torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=1.0),
        torch.optim.Adam([c], lr=rate),
    ]
    base = base_rates(optimizers)
    for factor in (0.5, 0.1):  # from the base each time, not from the last value
        set_rates(optimizers, base, factor)
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.1, 0.05]
    assert optimizers[1].param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.025)


@pytest.mark.parametrize(("k", "m"), [(1.0, 1.0), (15.0, 30.0)])
def test_square_loss(k, m):
    outputs = torch.randn(6, 5, dtype=torch.float64).float()
    labels = torch.tensor([0, 4, 2, 2, 1, 3])
    total = 0.0
    for row, label in zip(outputs.tolist(), labels.tolist(), strict=True):
        per_class = [k * (f - m) ** 2 if c == label else f**2 for c, f in enumerate(row)]
        total += sum(per_class) / 5
    loss = square_loss(outputs, labels, k=k, m=m)
    assert loss.item() == pytest.approx(total / 6, rel=1e-5)
    config = TrainConfig(epochs=1, loss="square", square_k=k, square_m=m)
    torch.testing.assert_close(make_loss(config, classes=5, kind="images")(outputs, labels), loss)


def test_cross_entropy_averages_over_tokens():
    outputs, labels = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    terms = [-outputs[i, j].log_softmax(0)[labels[i, j]].item() for i in range(2) for j in range(3)]
    assert cross_entropy(outputs, labels).item() == pytest.approx(sum(terms) / 6, rel=1e-5)
    half = cross_entropy(outputs.bfloat16(), labels)
    assert half.dtype == torch.float32


def test_label_smoothing_is_for_training_alone():
    outputs, labels = torch.randn(6, 5), torch.tensor([0, 4, 2, 2, 1, 3])
    scores = outputs.log_softmax(1)
    target = 0.9 * torch.nn.functional.one_hot(labels, 5) + 0.1 / 5
    config = TrainConfig(epochs=1, label_smoothing=0.1)
    loss = make_loss(config, classes=5, kind="images")(outputs, labels)
    torch.testing.assert_close(loss, -(target * scores).sum(1).mean())


def test_losses_that_do_not_fit_the_data():
    with pytest.raises(ConfigError, match="regression"):
        make_loss(TrainConfig(epochs=1), classes=0, kind="tabular")
    square = TrainConfig(epochs=1, loss="square")
    with pytest.raises(ConfigError, match="text"):
        make_loss(square, classes=9, kind="text")
    regression = make_loss(square, classes=0, kind="tabular")
    assert regression(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])).item() == 2.5
