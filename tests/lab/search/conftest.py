"""A search that takes seconds: two optimizers, few digits, one step an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFIG = """
seeds = [0, 1]
[data]
name = "digits"
limit = 32
[model]
name = "logistic"
[train]
epochs = 2
batch_size = 32
device = "cpu"
[search]
trials = [3, 2]
prune_worst = 0
[search.spaces.SGD]
lr = [1e-3, 1.0]
momentum = "fixed"
weight_decay = "fixed"
[[compare]]
label = "SGD"
optimizer = { name = "SGD", momentum = 0.9 }
[[compare]]
label = "AdamW"
optimizer = { name = "AdamW" }
"""


@pytest.fixture
def config_file(tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path
