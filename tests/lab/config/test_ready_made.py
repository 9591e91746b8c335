"""The configs that come with the project: each can be run as it stands."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rootfree_lab import data, models, optimizers
from rootfree_lab.bench.contenders import contenders
from rootfree_lab.config import own_code
from rootfree_lab.config.files import load_comparison, load_config
from rootfree_lab.config.own_code import shown
from rootfree_lab.config.reading import plain_options
from rootfree_lab.search.settings import check_spaces, load_entries

FOLDER = Path(__file__).parents[3] / "configs"
FILES = sorted(FOLDER.rglob("*.toml"))

# name -> kind, classes, shape of an example
KNOWN = {
    "breast_cancer": ("tabular", 2, (30,)),
    "cifar10": ("images", 10, (3, 32, 32)),
    "cifar100": ("images", 100, (3, 32, 32)),
    "cora": ("graph", 7, (1433,)),
    "diabetes": ("tabular", 0, (10,)),
    "digits": ("images", 10, (1, 8, 8)),
    "fashion_16.py:load": ("images", 10, (1, 16, 16)),
    "fashion_mnist": ("images", 10, (1, 28, 28)),
    "fashion_rgb.py:load": ("images", 10, (3, 32, 32)),
    "image_folder": ("images", 10, (3, 224, 224)),
    "letter": ("tabular", 26, (16,)),
    "mnist.py:load": ("images", 10, (1, 28, 28)),
    "ogbn_products": ("graph", 47, (100,)),
    "ptb": ("text", 10_000, ()),
    "sotu": ("text", 256, ()),
}
PAPER = (
    "convex_linear", "convex_logistic", "densenet121_cifar100", "focalnet_tiny_srf_imagewoof10",
    "gamlp_ogbn_products", "gcvit_xxtiny_imagewoof10", "lstm_ptb", "resnet34_cifar100",
    "resnet34_cifar100_original_scheme", "resnet50_cifar100", "resnet50_cifar100_square_loss",
    "swin_tiny_imagewoof10", "vgg16_bn_cifar100", "vmamba_tiny_imagewoof10",
)  # fmt: skip


def test_every_experiment_of_the_paper_is_there():
    assert {file.stem for file in FILES if file.parent.name == "paper"} == set(PAPER)


#: Defaults of the library that are not the paper's: its experiments say what they want.
NOT_THE_PAPERS = {
    "RFRMSprop": {"nesterov": False, "max_update": None, "fast_start": False},
    "IFShampoo": {"nesterov": False, "rate_by_rank": False},
}


@pytest.mark.parametrize("name", PAPER)
def test_experiments_of_the_paper_have_its_rules(name):
    for run in load_comparison(FOLDER / "paper" / f"{name}.toml"):
        for option, value in NOT_THE_PAPERS.get(run.optimizer.name, {}).items():
            assert plain_options(run.optimizer.options)[option] == value, run.label


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_settings_are_known_to_who_gets_them(file):
    runs = load_comparison(file)
    assert len({run.label for run in runs}) > 1
    assert load_config(file, [], runs[0].label) == runs[0]
    kind, classes, shape = KNOWN[shown(runs[0].data.name)]
    info = SimpleNamespace(kind=kind, classes=classes, shape=shape)
    with torch.device("meta"):
        models.build(runs[0].model.name, info, **plain_options(runs[0].model.options))
    small = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    for run in runs:
        assert run.data == runs[0].data
        assert run.model == runs[0].model
        if not optimizers.available(run.optimizer.name):
            continue
        optimizers.build(
            run.optimizer.name,
            small,
            batch_size=run.train.batch_size,
            **plain_options(run.optimizer.options),
        )


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_settings_can_be_searched(file):
    entries = load_entries(file)
    assert len({tuple(entry.search.trials) for entry in entries}) == 1
    check_spaces([e for e in entries if optimizers.available(e.config.optimizer.name)])


def test_the_cost_of_shampoo_is_measured_as_in_the_paper():
    """Refreshed every second step, IF-Shampoo in both precisions; bench has the same line-up."""
    runs = load_comparison(FOLDER / "small" / "shampoo_cost_vit.toml", ["seeds=[0]"])
    matrices = [run.optimizer.options for run in runs if run.optimizer.name != "AdamW"]
    assert [options["update_every"] for options in matrices] == [2, 2, 2]
    assert [options.get("factor_dtype") for options in matrices] == [None, None, "bfloat16"]
    assert {"Shampoo T=2", "IFShampoo T=2", "IFShampoo low memory T=2"} <= contenders().keys()


def test_the_root_switch_compares_like_with_like():
    """The same budget, number of settings, refreshes and companion on both sides."""
    compared = set()
    for file in FILES:
        entries = {entry.label: entry for entry in load_entries(file)}
        if not {"IFShampoo", "IFWhitening"} <= entries.keys():
            continue
        compared.add(file.stem.partition("_")[0])
        removed, kept = entries["IFShampoo"], entries["IFWhitening"]
        assert len(removed.space) == len(kept.space), file.stem
        assert removed.space["weight_decay"] == kept.space["weight_decay"]
        assert "lr" in removed.space.keys() & kept.space.keys()
        same = ("companion", "companion_options", "update_every", "weight_decay")
        a, b = (entry.config.optimizer.options for entry in (removed, kept))
        assert [a.get(name) for name in same] == [b.get(name) for name in same], file.stem
    assert {"resnet34", "small", "swin", "gpt", "lstm", "gamlp"} <= compared


def test_mnist_from_idx_files(tmp_path):
    """The data of the fine-tuning on a laptop."""
    pixels = np.arange(12, dtype=np.uint8).repeat(28 * 28)
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(bytes(16) + pixels.tobytes())
        labels = bytes(8) + bytes([*range(10), 0, 1])
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    made = own_code.load("data.name", f"{FOLDER / 'small' / 'mnist.py'}:load")(tmp_path)
    assert made.shape == (1, 28, 28)
    for split in (made.train, made.test):
        assert split.x[:, 3, 4, 0].tolist() == [*range(12)]
        assert split.y.tolist() == [*range(10), 0, 1]


def test_fashion_in_the_form_of_cifar():
    """The data of the fine-tuning: a margin of two pixels and three equal channels."""
    grey = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28, 1)
    split = (grey, np.array([0, 9]))
    plain = data.images("fashion_mnist", split, split, classes=10)
    file = FOLDER / "small" / "fashion_rgb.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda name, folder: plain)
        made = own_code.load("data.name", f"{file}:load")()
    assert made.shape == (3, 32, 32)
    for channel in range(3):
        assert np.array_equal(made.train.x[:, 2:-2, 2:-2, channel], grey[..., 0])
    assert int(made.train.x[:, :2].sum()) == int(made.train.x[:, :, -2:].sum()) == 0
