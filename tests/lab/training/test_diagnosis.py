"""How the optimizer is doing, in TensorBoard, and one warning when its factors go bad."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rootfree
from rootfree_lab.config.files import load_config
from rootfree_lab.training.run import train
from rootfree_lab.training.watching.loggers import Diagnosis


def test_tensorboard_has_the_numbers_of_every_parameter(tmp_path, config_file):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    asked = ["output.tensorboard=true", "optimizer.name=IFShampoo", "optimizer.lr=0.01"]
    train(load_config(config_file, asked), out=tmp_path)
    (folder,) = (tmp_path / "tensorboard").iterdir()
    log = events.EventAccumulator(str(folder)).Reload()
    found: dict[str, set[str]] = {}
    for tag in log.Tags()["scalars"]:
        what, _, name = tag.partition("/")
        found.setdefault(what, set()).add(name)
    names = found["parameter_norm"]
    assert any(name.endswith(".weight") for name in names)
    assert found["condition"] == found["update_ratio"] == found["momentum_norm"] == names
    (scalar,) = log.Scalars("skipped_steps")
    assert (scalar.step, scalar.value) == (5, 0)


def test_a_run_is_told_once():
    model = nn.Linear(4, 3)
    optimizer = rootfree.IFShampoo(model.named_parameters(), batch_size=1)
    session = SimpleNamespace(
        optimizers=[optimizer, torch.optim.SGD(model.parameters())],
        config=SimpleNamespace(title="mine seed 7"),
        done=30,
    )
    diagnosis = Diagnosis()
    diagnosis.point(session, {})
    optimizer.state[model.weight]["block0.factor1"][0, 0] = 0.0
    with pytest.warns(UserWarning, match=r"mine seed 7, step 30: factor block0.factor1 .*weight"):
        diagnosis.point(session, {})
    diagnosis.point(session, {})  # a second warning would be an error
    assert diagnosis.figures()["condition/weight"] == float("inf")
