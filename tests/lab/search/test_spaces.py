"""The spaces that come with the laboratory, and those of a config."""

from __future__ import annotations

import pytest
from torch import nn

from rootfree_lab import optimizers
from rootfree_lab.config_reading import ConfigError
from rootfree_lab.search import spaces
from rootfree_lab.search.ranges import Choice, Range
from rootfree_lab.search.settings import check, load_entries


@pytest.mark.parametrize("name", optimizers.names())
def test_every_optimizer_has_a_space_that_it_takes(name):
    space = spaces.space_of(name, {}, "here")
    assert "lr" in space
    assert "weight_decay" in space
    if not optimizers.available(name):
        pytest.skip(f"{name} is not installed")
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for end in (0, -1):
        settings = {key: allowed.ends()[end] for key, allowed in space.items()}
        optimizers.build(name, net, batch_size=4, **settings)


def test_no_space_is_of_an_unknown_optimizer():
    assert set(spaces.shipped()) <= set(optimizers.names())


def test_a_config_overrides_adds_and_takes_out():
    given = {
        "lr": [1.0, 2.0],
        "momentum": "fixed",
        "nesterov": {"choices": [True, False]},
        "companion_options": {"lr": [1e-4, 1e-2]},
    }
    space = spaces.space_of("SGD", given, "here")
    assert space["lr"] == Range(1.0, 2.0)
    assert "momentum" not in space
    assert space["weight_decay"] == spaces.shipped()["SGD"]["weight_decay"]
    assert space["nesterov"] == Choice((True, False))
    assert space["companion_options.lr"] == Range(1e-4, 1e-2)
    # As it is written out, it reads back.
    assert spaces.space_of("", spaces.as_table(space), "here") == space


def test_settings_go_where_their_names_say():
    before = {"companion_options": {"lr": 1.0, "eps": 2.0}, "lr": 3.0}
    after = spaces.with_settings(before, {"companion_options.lr": 4.0, "momentum": 5.0})
    assert after == {"companion_options": {"lr": 4.0, "eps": 2.0}, "lr": 3.0, "momentum": 5.0}
    assert before == {"companion_options": {"lr": 1.0, "eps": 2.0}, "lr": 3.0}


def test_proposals_are_the_same_on_every_machine():
    space = {"lr": Range(1e-4, 1e-1), "momentum": Range(0.1, 0.99, "complement")}
    first = spaces.propose(space, "0/AdamW/1/0")
    assert first == {"lr": 0.04242, "momentum": 0.97024}
    assert spaces.propose(space, "0/AdamW/1/1") != first
    assert spaces.propose(space, "1/AdamW/1/0") != first
    wider = {"damping": Range(1e-8, 1e-2), **space}
    assert {k: v for k, v in spaces.propose(wider, "0/AdamW/1/0").items() if k in space} == first


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("search.spaces.AdamW.lrr=[1e-3, 1]", "'lrr' is unknown; did you mean 'lr'"),
        ("search.spaces.AdamW.lr=[1, 1e-3]", "search.spaces.AdamW.lr must have low < high"),
        ("search.spaces.AdamW.momentum=[0.5, 2]", "search.spaces.AdamW.momentum: AdamW"),
        ("search.spaces.Adam.lr=[1e-3, 1]", "did you mean 'AdamW'"),
        ("search.spaces.AdamW.lrr=fixed", "'lrr' is unknown"),
        ("search.spaces.AdamW=1", "must be a table"),
        ("search.trials=[3]", "search.trials must be two counts"),
        ("search.trials=[0, 3]", "search.trials must be two counts"),
        ("search.measure=test_eror", "did you mean 'test_error'"),
        ("search.narrow=0", "search.narrow must be in (0, 1]"),
        ("search.prune_worst=2", "search.prune_worst must be in [0, 1]"),
        ("search.seed=-1", "search.seed must be at least 0"),
        ("search.trails=[3, 2]", "did you mean 'search.trials'"),
        ("data.name=diabetes", "measure"),
    ],
)
def test_bad_searches_are_refused_before_anything_runs(config_file, assignment, said):
    more = ["search.measure=test_error"] if assignment.startswith("data") else []
    more += ["model.name=linear", "train.loss=square"] if more else []
    with pytest.raises(ConfigError) as error:
        check(load_entries(config_file, [assignment, *more]))
    assert said in str(error.value)


def test_a_search_leaves_train_and_compare_alone(config_file):
    from rootfree_lab.config_files import load_comparison

    with_search = load_comparison(config_file)
    config_file.write_text(
        config_file.read_text().replace("[3, 2]", "[9, 9]").replace("1e-3, 1.0", "1e-3, 2.0")
    )
    assert load_comparison(config_file) == with_search
    assert len(with_search) == 4
