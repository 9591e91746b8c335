"""The tasks: B, committed losses, data from a compact folder, low-rank layers, records."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from rootfree_lab.bench.first_try.data import pack
from rootfree_lab.bench.first_try.entrants import Entrant
from rootfree_lab.bench.first_try.lora import LoRALinear, pretrained_with_lora
from rootfree_lab.bench.first_try.records import Record, read
from rootfree_lab.bench.first_try.runs import _Losses, train, with_losses
from rootfree_lab.bench.first_try.suite import ALL, SCALES, Run, config_of
from rootfree_lab.training.checking import check

COMMITTED = Path(__file__).parents[4] / "docs" / "first_try" / "small.jsonl"


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
    for name, columns, classes in (("letter", 16, 26), ("magic", 10, 2), ("spambase", 57, 2)):
        rows = [[*random.random(columns).round(3), f"c{i % classes}"] for i in range(200)]
        lines = [",".join(map(str, row)) for row in rows]
        (folder / f"{name}.dat").write_text("\n".join(lines))
    return folder


def record(task: str, *, steps: int = 2, scale: str = "small") -> Record:
    return Record(
        task=task, optimizer="AdamW", label="AdamW", options={}, seed=0, scale=scale, steps=steps,
        constant=False, device="cpu",
    )  # fmt: skip


# Images, tokens, nodes, rows: the terms that the loss averages.
BATCH_SIZES = {
    "mlp_digits": 64, "cnn_bn_digits": 64, "cnn_digits": 64, "resnet_cifar10": 32,
    "vgg_cifar10": 32, "vit_cifar10": 32, "gpt_sotu": 16 * 64, "lstm_sotu": 32 * 32,
    "gat_cora": 12, "logistic_breast_cancer": 64, "least_squares_diabetes": 64, "lora_digits": 64,
    "mlp_letter": 128, "mlp_magic": 64, "mlp_batch512_digits": 512, "cnn_batch4_digits": 4,
    "cnn_square_digits": 64, "densenet_cifar10": 32, "swin_cifar10": 32, "gcvit_cifar10": 32,
    "focalnet_cifar10": 32, "vmamba_cifar10": 32, "gamlp_cora": 12, "logistic_letter": 128,
    "logistic_spambase": 64,
}  # fmt: skip


@pytest.mark.parametrize("task", ALL)
def test_every_task_trains_and_is_measured(task, folder):
    found = train(Run(record(task), Entrant("AdamW"), folder))
    assert found.batch_size == BATCH_SIZES[task]
    assert found.final_loss is not None
    assert found.test_loss is not None
    assert found.first_loss > 0


def test_a_committed_run_comes_out_again():
    """Seeds, order of the batches, schedule, loss and optimizer are those of the records."""
    known = next(
        r for r in read(COMMITTED)
        if (r.task, r.label, r.seed, r.constant) == ("mlp_digits", "AdamW", 0, False)
    )  # fmt: skip
    entrant = Entrant("AdamW")
    assert entrant.effective() == known.options
    found = train(Run(record("mlp_digits", steps=known.steps), entrant))
    # Far above rounding, which another machine does otherwise, and far below another order.
    for (_, mine), (_, theirs) in zip(found.curve, known.curve, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert found.final_loss == pytest.approx(known.final_loss, rel=1e-3)
    assert found.test_error == pytest.approx(known.test_error)


@pytest.mark.parametrize("task", ALL)
def test_a_task_at_full_scale_is_a_config_that_can_be_trained(task, folder):
    config = Run(record(task, scale="full"), Entrant("IFShampoo"), folder).config
    check(replace(config, train=replace(config.train, batch_size=2)))  # the folder has few images
    small, full = (config_of(task, scale).train.steps for scale in SCALES)
    assert 100 <= small < full


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


def test_low_rank_models_of_two_seeds_share_the_pretrained_weights():
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(dict(pretrained_with_lora(width=64).named_parameters()))
    for name, a in made[0].items():
        assert torch.equal(a, made[1][name]) == ("base" in name or name.endswith(".B"))
        assert a.requires_grad == ("base" not in name)


def test_losses_are_kept_where_a_replayed_pass_writes_over_them():
    losses, session = _Losses(whole=False), SimpleNamespace(loss=torch.zeros(()))
    for step in range(3):
        session.loss.fill_(step)
        losses.stepped(session)
    assert torch.stack(losses.steps).tolist() == [0.0, 1.0, 2.0]


def test_what_the_losses_say():
    losses = torch.cat([torch.full((50,), 4.0), torch.full((50,), 1.0), torch.full((50,), 2.0)])
    found = with_losses(record("mlp_digits", steps=150), losses, full=None)
    assert (found.first_loss, found.final_loss, found.best_mean) == (4, 2, 1)
    assert found.late_ratio == 2
    assert not found.diverged
    assert with_losses(record("mlp_digits", steps=150), losses, full=0.7).final_loss == 0.7


@pytest.mark.parametrize(("end", "expected"), [(0.0, 1), (6e-8, 1), (3e-7, 3e-7 / 2**-23)])
def test_losses_below_rounding_are_no_spikes(end, expected):
    """The smallest number of cross entropy in float32 is about 2^-23."""
    losses = torch.tensor([1.0, 0.0, end], dtype=torch.float64).repeat_interleave(50)
    found = with_losses(record("mlp_digits", steps=150), losses, full=None)
    assert found.late_ratio == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("end", [math.nan, math.inf, 4.5])
def test_divergence(end):
    losses = torch.cat([torch.full((50,), 4.0), torch.full((50,), end)])
    assert with_losses(record("mlp_digits", steps=100), losses, full=None).diverged


def test_a_run_that_ended_early_diverged():
    found = with_losses(record("mlp_digits", steps=100), torch.full((80,), 4.0), full=None)
    assert found.diverged
    assert [loss for step, loss in found.curve if step in (80, 85)] == [4.0, None]


def test_a_run_whose_loss_is_no_number_is_on_record():
    entrant = Entrant("SGD", {"lr": 1e30})
    found = train(Run(record("mlp_digits", steps=60), entrant))
    assert found.diverged
    assert "not finite" in found.failure
    assert found.test_loss is None


def test_a_step_that_cannot_be_made_is_on_record(monkeypatch):
    def step(optimizer, closure=None):
        raise torch.linalg.LinAlgError("no decomposition")

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    found = train(Run(record("mlp_digits"), Entrant("SGD")))
    assert found.diverged
    assert found.failure == "no decomposition"
    assert (found.first_loss, found.test_loss) == (None, None)
