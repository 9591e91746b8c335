"""The tasks: B, batches, data from a compact folder, low-rank layers, schedules, losses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rootfree_lab.bench.first_try.data import pack
from rootfree_lab.bench.first_try.entrants import Entrant
from rootfree_lab.bench.first_try.lora import LoRALinear, lora_digits
from rootfree_lab.bench.first_try.suite import TASKS, factor
from rootfree_lab.bench.first_try.task import Measured, Setting, batch_indices
from rootfree_lab.bench.first_try.training import Run, train, with_losses

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Noise in the format of the compact folder."""
    folder = tmp_path_factory.mktemp("compact")
    random = np.random.default_rng(0)
    parts = {}
    for part, count in (("train", 64), ("test", 20)):
        parts[f"{part}_x"] = random.integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)
        parts[f"{part}_y"] = (np.arange(count) % 10).astype(np.uint8)
    np.savez_compressed(folder / "cifar10.npz", **parts)
    (folder / "sotu.txt").write_text("We the people of the United States. " * 400)
    nodes = 30
    np.savez(
        folder / "cora.npz",
        feat_data=np.ones(nodes, dtype=np.float32), feat_indices=np.arange(nodes) % 7,
        feat_indptr=np.arange(nodes + 1), feat_shape=np.array([nodes, 7]),
        labels=np.arange(nodes) % 3,
        edges=np.stack([np.arange(nodes - 1), np.arange(1, nodes)], 1),
        train_idx=np.arange(12), val_idx=np.arange(12, 20), test_idx=np.arange(20, 30),
    )  # fmt: skip
    return folder


def run(task: str, folder: Path, *, constant: bool = False) -> Run:
    return Run(task, Entrant("AdamW"), 0, "small", 2, constant, "cpu", folder)


# Images, tokens, nodes, rows: the terms that the loss averages.
BATCH_SIZES = {
    "mlp_digits": 64, "cnn_bn_digits": 64, "cnn_digits": 64, "resnet_cifar10": 32,
    "vgg_cifar10": 32, "vit_cifar10": 32, "gpt_sotu": 16 * 64, "lstm_sotu": 32 * 32,
    "gat_cora": 12, "logistic_breast_cancer": 64, "least_squares_diabetes": 64, "lora_digits": 64,
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_and_is_measured(task, folder):
    record = train(run(task, folder))
    assert record.batch_size == BATCH_SIZES[task]
    assert record.final_loss is not None
    assert record.test_loss is not None
    assert record.first_loss > 0


def test_full_scale_crops_and_flips(folder, monkeypatch):
    """At full scale images are changed at random: a batch of one epoch is not that of the next."""
    from rootfree_lab.bench.first_try import image_tasks

    monkeypatch.setattr(image_tasks.models, "build", lambda *_, **__: nn.Identity())
    monkeypatch.setattr(image_tasks, "cross_entropy", lambda x, y: x)
    setting = Setting("full", 0, 3, CPU, folder)
    monkeypatch.setattr(image_tasks, "batch_indices", lambda *_: torch.arange(64).repeat(3, 1))
    task = image_tasks.vit_cifar10(setting)
    assert task.loss(0).shape == (64, 3, 32, 32)
    assert not torch.equal(task.loss(0), task.loss(1))
    again = image_tasks.vit_cifar10(setting)
    assert torch.equal(task.loss(1), again.loss(1))


@pytest.mark.parametrize("name", ["mlp_digits", "gpt_sotu", "least_squares_diabetes", "gat_cora"])
def test_the_loss_averages_as_many_terms_as_B(name, folder):
    """A term of the mean has its share of the gradient, so B of the scores' rows have one."""
    task = TASKS[name].build(Setting("small", 0, 1, CPU, folder))
    scores: list[torch.Tensor] = []
    task.model.register_forward_hook(lambda model, inputs, output: scores.append(output))
    loss = task.loss(0)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert int((gradient != 0).any(-1).sum()) == task.batch_size


def test_packing_a_packed_folder_changes_nothing(folder, tmp_path):
    lines = pack(tmp_path / "again", folder)
    assert [line.split(":")[0] for line in lines] == ["cifar10.npz", "sotu.txt", "cora.npz"]
    assert (tmp_path / "again" / "sotu.txt").read_bytes() == (folder / "sotu.txt").read_bytes()
    with np.load(folder / "cifar10.npz") as a, np.load(tmp_path / "again" / "cifar10.npz") as b:
        assert all((a[key] == b[key]).all() for key in a.files)


def test_packing_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOTFREE_CACHE", str(tmp_path / "cache"))
    lines = pack(tmp_path / "out")
    assert all("left out" in line for line in lines)
    assert "rootfree data fetch cifar10" in lines[0]


def test_batches_are_epochs_and_depend_on_the_seed():
    one, two = (batch_indices(Setting("small", s, 7, CPU, None), 10, 3) for s in (0, 1))
    assert one.shape == (7, 3)
    assert len(set(one[:3].flatten().tolist())) == 9
    assert len(set(one[3:6].flatten().tolist())) == 9
    assert not torch.equal(one, two)
    assert torch.equal(one, batch_indices(Setting("small", 0, 7, CPU, None), 10, 3))


def test_a_low_rank_layer_starts_as_the_layer_it_wraps():
    base = nn.Linear(6, 5)
    layer = LoRALinear(base, rank=4)
    x = torch.randn(3, 6)
    assert torch.equal(layer(x), base(x))
    with torch.no_grad():
        layer.B.normal_()
    expected = x @ (base.weight + layer.B @ layer.A).T + base.bias
    torch.testing.assert_close(layer(x), expected)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["A", "B"]


def test_low_rank_tasks_of_two_seeds_share_the_pretrained_weights():
    one, two = (lora_digits(Setting("small", s, 1, CPU, None)).model for s in (0, 1))
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b) == ("base" in name or name.endswith(".B"))
        assert a.requires_grad == ("base" not in name)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedules_warm_up_and_end_at_zero(schedule):
    values = [factor(schedule, step, 100) for step in range(100)]
    assert values[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert values[5:] == sorted(values[5:], reverse=True)
    assert 0 < values[-1] < 0.02
    assert factor(schedule, 100, 100) == pytest.approx(0, abs=1e-12)
    assert factor("constant", 99, 100) == 1


def test_what_the_losses_say():
    start = run("mlp_digits", Path()).record
    losses = torch.cat([torch.full((50,), 4.0), torch.full((50,), 1.0), torch.full((50,), 2.0)])
    record = with_losses(start, losses, full=None, measured=Measured(3.0, 0.5))
    assert (record.first_loss, record.final_loss, record.best_mean) == (4, 2, 1)
    assert record.late_ratio == 2
    assert not record.diverged
    assert with_losses(start, losses, full=0.7, measured=Measured(3.0, 0.5)).final_loss == 0.7


@pytest.mark.parametrize("end", [math.nan, math.inf, 4.5])
def test_divergence(end):
    losses = torch.cat([torch.full((50,), 4.0), torch.full((50,), end)])
    record = with_losses(run("mlp_digits", Path()).record, losses, full=None,
                         measured=Measured(math.nan, None))  # fmt: skip
    assert record.diverged
    assert record.test_loss is None
