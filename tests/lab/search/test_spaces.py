"""The spaces that come with the laboratory, and those of a config."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rootfree_lab import optimizers
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.search import spaces
from rootfree_lab.search.settings import check, load_entries
from rootfree_lab.search.spaces import Choice, Range


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
    first = spaces.propose(space, "0/AdamW/1", 0, block=6)
    assert first == {"lr": 0.0008668, "momentum": 0.97461}
    assert spaces.propose(space, "0/AdamW/1", 1, block=6) != first
    assert spaces.propose(space, "1/AdamW/1", 0, block=6) != first
    wider = {"damping": Range(1e-8, 1e-2), **space}
    again = spaces.propose(wider, "0/AdamW/1", 0, block=6)
    assert {k: v for k, v in again.items() if k in space} == first


@given(st.integers(1, 9), st.integers(0, 3), st.text(max_size=5))
def test_a_block_of_trials_draws_once_from_each_part_of_a_range(block, which, key):
    space = {"a": Range(0.0, 1.0, "linear"), "b": Range(0.0, 1.0, "linear")}
    numbers = range(which * block, (which + 1) * block)
    drawn = [spaces.propose(space, key, number, block=block) for number in numbers]
    for name in space:
        # Four digits may carry a draw to the end of its part.
        parts = sorted(settings[name] * block for settings in drawn)
        for part, value in enumerate(parts):
            assert part - 1e-3 * block <= value <= part + 1 + 1e-3 * block


def test_settings_are_not_drawn_in_step():
    """The parts of two settings are in different orders: all pairs of them can meet."""
    space = {"a": Range(0.0, 1.0, "linear"), "b": Range(0.0, 1.0, "linear")}
    met = set()
    for key in range(40):
        for number in range(3):
            drawn = spaces.propose(space, str(key), number, block=3)
            met.add(tuple(min(int(3 * value), 2) for value in drawn.values()))
    assert len(met) == 9


def test_a_search_draws_as_its_config_says(config_file):
    def rates(*assignments):
        entry = load_entries(config_file, ["search.trials=[4, 9]", *assignments])[0]
        return [entry.settings(slot, entry.space)["lr"] for slot in entry.slots]

    wide = Range(1e-3, 1.0)
    quarters = [wide.at(part / 4) for part in range(5)]
    for start in (0, 4, 8):  # the wide stage, and the narrowed one in blocks of four
        ordered = sorted(rates()[start : start + 4])
        assert all(
            low <= lr <= high
            for low, lr, high in zip(quarters[:-1], ordered, quarters[1:], strict=True)
        )
    assert rates()[:6] == rates("search.trials=[4, 2]")  # more of them later change none
    assert rates("search.draws=independent") != rates()


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
        ("search.draws=random", "the value of search.draws 'random' is unknown"),
        ("search.narrow=0", "search.narrow must be in (0, 1]"),
        ("search.prune_worst=2", "search.prune_worst must be in [0, 1]"),
        ("search.seed=-1", "search.seed must be at least 0"),
        ("search.trails=[3, 2]", "did you mean 'search.trials'"),
        ("data.name=diabetes", "measure"),
        (
            "compare.AdamW.optimizer.betas=[0.9, 0.95]",
            "If it is not to be drawn, write precond_lr =",
        ),
        ("search.spaces.AdamW.betas={choices = [1, 2]}", "search.spaces.AdamW"),
    ],
)
def test_bad_searches_are_refused_before_anything_runs(config_file, assignment, said):
    more = ["search.measure=test_error"] if assignment.startswith("data") else []
    more += ["model.name=linear", "train.loss=square"] if more else []
    with pytest.raises(ConfigError) as error:
        check(load_entries(config_file, [assignment, *more]))
    assert said in str(error.value)


def test_a_search_leaves_train_and_compare_alone(config_file):
    from rootfree_lab.config.files import load_comparison

    with_search = load_comparison(config_file)
    config_file.write_text(
        config_file.read_text().replace("[3, 2]", "[9, 9]").replace("1e-3, 1.0", "1e-3, 2.0")
    )
    assert load_comparison(config_file) == with_search
    assert len(with_search) == 4
