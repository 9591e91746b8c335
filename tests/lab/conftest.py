"""Small real runs: digits, a small network, a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rootfree_lab.config.files import config_from

OPTIMIZERS = {
    "IFShampoo": {"name": "IFShampoo", "lr": 1e-2, "riemannian_momentum": 0.5},
    "RFRMSprop": {"name": "RFRMSprop", "lr": 3e-3},
    "AdamW": {"name": "AdamW", "lr": 1e-3},
}


@pytest.fixture(autouse=True)
def one_thread():
    old = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(old)


@pytest.fixture
def make_config():
    """A config of `steps` steps in epochs of 5 batches, evaluated every 3."""

    def make(optimizer="AdamW", *, steps=8, seed=0, output=None, **train):
        tables = {
            "data": {"name": "digits", "limit": 160, "augment": True},
            "model": {"name": "small_cnn"},
            "optimizer": OPTIMIZERS[optimizer],
            "schedule": {"name": "cosine", "warmup_epochs": 0.4},
            "train": {
                "steps": steps,
                "batch_size": 32,
                "seed": seed,
                "device": "cpu",
                "eval_every": 3,
                **train,
            },
            "output": output or {},
        }
        return config_from(tables)

    return make


CONFIG_FILE = """
seeds = [0, 1]
[data]
name = "digits"
limit = 160
[model]
name = "small_cnn"
[optimizer]
name = "SGD"
lr = 0.1
[train]
epochs = 1
batch_size = 32
device = "cpu"
[[compare]]
label = "SGD"
optimizer = { momentum = 0.9 }
[[compare]]
label = "AdamW v1.5"
optimizer = { name = "AdamW", lr = 1e-3 }
"""


@pytest.fixture
def config_file(tmp_path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG_FILE)
    return path


def without_times(record):
    """What must be equal in two runs of one config."""
    curve = [{k: v for k, v in point.items() if k != "seconds"} for point in record["curve"]]
    same = ("label", "config", "identity", "seed", "final", "steps", "completed")
    return {"curve": curve, **{key: record[key] for key in same}}


@pytest.fixture
def comparable():
    return without_times
