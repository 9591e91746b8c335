"""Weights that a run leaves, and another one starts from."""

from __future__ import annotations

import pytest
import torch

from rootfree_lab.config.files import load_config
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.files.weights import weights_path
from rootfree_lab.training.checking import check
from rootfree_lab.training.run import train
from rootfree_lab.training.session import Session


@pytest.fixture
def trained(tmp_path, config_file):
    """The file of a trained network on digits, and the config."""
    config = load_config(config_file, ["output.weights=true"])
    train(config, out=tmp_path)
    return weights_path(tmp_path, config), config_file


def settings(path, *more):
    return [f"model.weights='{path}'", *more]


def test_a_run_starts_where_another_ended(trained):
    path, file = trained
    saved = torch.load(path)
    session = Session(load_config(file, settings(path)), torch.device("cpu"))
    for name, value in session.model.state_dict().items():
        assert torch.equal(value, saved[name])
    untrained = Session(load_config(file), torch.device("cpu"))
    fresh = Session(load_config(file, settings(path, 'model.fresh=["8"]')), torch.device("cpu"))
    for name, value in fresh.model.state_dict().items():
        expected = untrained.model.state_dict() if name.startswith("8.") else saved
        assert torch.equal(value, expected[name]), name
    assert not list(path.parent.glob("*.tmp"))


def test_the_weights_are_part_of_a_run_and_their_place_is_not(trained, tmp_path):
    path, file = trained
    before = load_config(file, settings(path)).identity()
    assert before != load_config(file).identity()
    moved = tmp_path / "moved.pt"
    path.rename(moved)
    assert load_config(file, settings(moved)).identity() == before
    state = torch.load(moved)
    torch.save({name: value + 1 for name, value in state.items()}, moved)
    assert load_config(file, settings(moved)).identity() != before


def test_weights_that_do_not_fit_are_refused(trained, tmp_path):
    path, file = trained
    with pytest.raises(ConfigError, match=r"model\.weights: there is no file"):
        check(load_config(file, settings(tmp_path / "nothing.pt")))
    with pytest.raises(ConfigError, match=r"0\.weight is 8x1x3x3 in the model and 16x1x3x3"):
        Session(load_config(file, settings(path, "model.options.width=8")), torch.device("cpu"))
    with pytest.raises(ConfigError, match="nothing of the name 'head'"):
        Session(load_config(file, settings(path, 'model.fresh=["head"]')), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"fresh goes with model\.weights"):
        load_config(file, ['model.fresh=["8"]'])
    torch.save({**torch.load(path), "more": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match=r"more is missing in the model and 2 in"):
        Session(load_config(file, settings(path)), torch.device("cpu"))
    torch.save([1], path)
    with pytest.raises(ConfigError, match="is not the state of a model"):
        Session(load_config(file, settings(path)), torch.device("cpu"))
    path.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="cannot be read"):
        Session(load_config(file, settings(path)), torch.device("cpu"))
