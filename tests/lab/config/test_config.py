"""Configs: types, typos, overrides, entries of a comparison."""

from __future__ import annotations

import pytest

from rootfree_lab.config.files import load_comparison, load_config
from rootfree_lab.config.reading import ConfigError


def test_a_file_becomes_a_typed_config(config_file):
    config = load_config(config_file)
    assert config.label == "SGD"
    assert config.optimizer.options == {"lr": 0.1}
    assert config.train.epochs == 1
    assert config.train.loss == "cross_entropy"
    assert config.schedule.name == "constant"
    assert config.as_table()["optimizer"] == {"name": "SGD", "lr": 0.1}


@pytest.mark.parametrize(
    ("assignment", "read", "value"),
    [
        ("optimizer.lr=3e-4", lambda c: c.optimizer.options["lr"], 3e-4),
        ("optimizer.betas=[0.9, 0.99]", lambda c: c.optimizer.options["betas"], [0.9, 0.99]),
        ("model.options.width=4", lambda c: c.model.options["width"], 4),
        ("data.augment=true", lambda c: c.data.augment, True),
        ("data.folder='a b'", lambda c: c.data.folder, "a b"),
        ("data.folder=/data/a b-1.0", lambda c: c.data.folder, "/data/a b-1.0"),
        ("data.folder=../a", lambda c: c.data.folder, "../a"),
        ("data.folder=~/a", lambda c: c.data.folder, "~/a"),
        ("data.folder=C:\\a", lambda c: c.data.folder, "C:\\a"),
        ("train.loss=square", lambda c: c.train.loss, "square"),  # a bare word is a string
        ("train.square_k=15", lambda c: c.train.square_k, 15.0),
        ("train.eval_every=7", lambda c: c.train.eval_every, 7),
        ("schedule.warmup_epochs = 2", lambda c: c.schedule.warmup_epochs, 2.0),
        ("schedule={name='step', milestones=[1, 2.5]}", lambda c: c.schedule.milestones, (1, 2.5)),
        ("output.tensorboard=true", lambda c: c.output.tensorboard, True),
        ("label=mine", lambda c: c.label, "mine"),
    ],
)
def test_every_kind_of_field_can_be_set(config_file, assignment, read, value):
    got = read(load_config(config_file, [assignment]))
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("train.batchsize=3", ["train.batchsize", "did you mean 'train.batch_size'", "epochs"]),
        ("trian.epochs=3", ["'trian'", "did you mean 'train'"]),
        ("train.epochs=1.5", ["train.epochs", "an integer", "1.5"]),
        ("train.epochs=true", ["train.epochs", "an integer", "True"]),
        ("train.epochs=0", ["train.epochs", "at least 1", "0"]),
        ("train.steps=3", ["train.epochs", "train.steps", "one of the two"]),
        ("train.loss=cross_entrpy", ["train.loss", "did you mean 'cross_entropy'", "square"]),
        ("train.seed=-1", ["train.seed", "from 0 to", "-1"]),
        ("train.autocast=fp8", ["train.autocast", "bf16"]),
        ("train.square_m=0", ["train.square_m", "positive"]),
        ("train.clip_norm=0", ["train.clip_norm", "positive", "0"]),
        ("train.label_smoothing=1.5", ["train.label_smoothing", "[0, 1]", "1.5"]),
        ("train={epochs=1, loss='square', label_smoothing=0.1}", ["label_smoothing", "'square'"]),
        ("train={epochs=1, graphs=true, deterministic=false}", ["train.graphs", "deterministic"]),
        ("data={name='digits', augment=true, crop='resised'}", ["data.crop", "'resized'"]),
        ("data={name='digits', augment=true, erase=-0.1}", ["data.erase", "[0, 1]", "-0.1"]),
        ("data.erase=0.5", ["data.erase", "data.augment = true", "0.5"]),
        ("data.random_windows=true", ["data.random_windows", "data.augment = true", "false"]),
        ("schedule.warmup_share=1.5", ["schedule.warmup_share", "[0, 1]", "1.5"]),
        ("schedule.name=cosin", ["schedule.name", "did you mean 'cosine'"]),
        ("schedule.milestones=[1]", ["milestones", "'step'"]),
        ("schedule={name='step', milestones=[2, 1]}", ["schedule.milestones", "increasing"]),
        ("schedule={name='step', milestones=['a']}", ["schedule.milestones", "a list"]),
        ("data.augment=1", ["data.augment", "true or false", "1"]),
        ("data.name=3", ["data.name", "a string", "3"]),
        ("model.options=3", ["model.options", "a table"]),
        ("model=3", ["model must be a table"]),
        ("model.name.x=3", ["'name' is not a table"]),
        ("optimizer.name=3", ["optimizer", "name"]),
        ("optimizer.lr=.5", ["optimizer.lr", "not a TOML value"]),
        ("optimizer.lr=.5.", ["optimizer.lr", "not a TOML value"]),
        ("optimizer.lr", ["NAME=VALUE"]),
        ("compare.SDG.optimizer.lr=1", ["'SDG'", "did you mean 'SGD'", "AdamW v1.5"]),
        ("compare.SGD.optimiser.lr=1", ["compare.SGD", "'optimiser'", "did you mean 'optimizer'"]),
        ("output.checkpoint_minutes=-1", ["output.checkpoint_minutes", "at least 0"]),
    ],
)
def test_errors_name_the_setting_the_value_and_what_is_allowed(config_file, assignment, said):
    with pytest.raises(ConfigError) as error:
        load_config(config_file, [assignment])
    assert all(words in str(error.value) for words in said), str(error.value)


def test_missing_tables_and_files(tmp_path):
    path = tmp_path / "c.toml"
    with pytest.raises(ConfigError, match="no config file"):
        load_config(path)
    path.write_text("[data")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(path)
    path.write_text("[data]\n[model]\nname='m'\n[optimizer]\nname='o'\n[train]\nepochs=1\n")
    with pytest.raises(ConfigError, match=r"data\.name is missing"):
        load_config(path)
    path.write_text("[data]\nname='d'\n")
    with pytest.raises(ConfigError, match=r"\[model\] is missing"):
        load_config(path)


def test_identity_is_of_what_determines_the_result(config_file):
    base = load_config(config_file)
    assert base.identity() == load_config(config_file, ["output.timing=false"]).identity()
    assert base.identity() == load_config(config_file, ["label=other"]).identity()
    for assignment in ("optimizer.lr=0.2", "train.seed=1", "data.limit=100"):
        assert base.identity() != load_config(config_file, [assignment]).identity()


def test_none_takes_a_setting_away(config_file):
    config = load_config(config_file, ["train.epochs=none", "train.steps=3", "data.limit=none"])
    assert (config.train.epochs, config.train.steps, config.data.limit) == (None, 3, None)
    with pytest.raises(ConfigError, match=r"train\.batch_size must be an integer"):
        load_config(config_file, ["train.batch_size=none"])


def test_the_command_line_wins_over_the_entries(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("""
        seeds = [0, 1]
        data = { name = "digits" }
        model = { name = "small_cnn" }
        train = { epochs = 2 }
        [[compare]]
        label = "a"
        optimizer = { name = "SGD", lr = 0.1 }
        [[compare]]
        label = "b"
        seeds = [5]
        optimizer = { name = "AdamW", lr = 0.2 }
        train = { epochs = 3, batch_size = 16 }
    """)
    told = ["optimizer.lr=0.5", "train.epochs=7", "seeds=[4]"]
    a, b = load_comparison(path, told)
    assert [(r.optimizer.name, r.optimizer.options) for r in (a, b)] == [
        ("SGD", {"lr": 0.5}),
        ("AdamW", {"lr": 0.5}),
    ]
    assert [(r.train.epochs, r.train.batch_size, r.train.seed) for r in (a, b)] == [
        (7, 128, 4),
        (7, 16, 4),
    ]
    assert load_config(path, told[:2], "b").optimizer.options == {"lr": 0.5}
    with pytest.raises(ConfigError, match="choose one"):
        load_config(path, told[:1])
    a, b = load_comparison(path, ["seeds=[4]", "optimizer.lr=0.5", "compare.b.optimizer.lr=0.6"])
    assert (a.optimizer.options["lr"], b.optimizer.options["lr"]) == (0.5, 0.6)


def test_entries_override_the_base(config_file):
    runs = load_comparison(config_file, ["train.batch_size=16", "compare.AdamW v1.5.seeds=[5]"])
    assert [(run.label, run.train.seed) for run in runs] == [
        ("SGD", 0),
        ("SGD", 1),
        ("AdamW v1.5", 5),
    ]
    # The same optimizer: its options are merged. Another one: none are inherited.
    assert runs[0].optimizer.options == {"lr": 0.1, "momentum": 0.9}
    assert runs[2].optimizer.options == {"lr": 1e-3}
    assert all(run.train.batch_size == 16 for run in runs)
    assert load_config(config_file, [], "AdamW v1.5").optimizer.name == "AdamW"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[[compare]]\nlabel = 'SGD'\n", "given twice"),
        ("[[compare]]\noptimizer = {name = 'x'}\n", "needs a label"),
        ("[[compare]]\nlabel = 'SGD copy'\noptimizer = {momentum = 0.9}\n", "the same settings"),
        ("[[compare]]\nlabel = 'x'\nseeds = [1, 1]\n", "different integers"),
        ("[[compare]]\nlabel = 'x'\nseeds = 1\n", "a list"),
    ],
)
def test_bad_entries(config_file, more, said):
    config_file.write_text(config_file.read_text() + more)
    with pytest.raises(ConfigError, match=said):
        load_comparison(config_file)


def test_a_file_with_entries_alone_asks_which(config_file):
    text = config_file.read_text().replace('[optimizer]\nname = "SGD"\nlr = 0.1\n', "")
    config_file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(config_file)
    assert str(error.value).splitlines()[1:] == ["  --entry SGD", "  --entry 'AdamW v1.5'"]
    with pytest.raises(ConfigError, match="'AdamW'"):
        load_config(config_file, [], "AdamW")


def test_the_only_entry_is_chosen(config_file):
    base, first, _ = config_file.read_text().split("[[compare]]")
    base = base.replace('[optimizer]\nname = "SGD"\nlr = 0.1\n', "")
    first = first.replace("{ momentum", "{ name = 'SGD', momentum")
    config_file.write_text(f"{base}[[compare]]{first}")
    assert load_config(config_file).label == "SGD"


def test_a_run_has_the_first_of_the_seeds_or_the_one_that_is_named(config_file):
    assert load_config(config_file, ["seeds=[5]"]).train.seed == 5
    assert load_config(config_file, ["seeds=[7, 5]"], "SGD").train.seed == 7
    assert load_config(config_file, ["compare.SGD.seeds=[6]"], "SGD").train.seed == 6
    # What is on the command line replaces the other of the file.
    named = ["train.seed=9"]
    assert load_config(config_file, named, "SGD").train.seed == 9
    assert {run.train.seed for run in load_comparison(config_file, named)} == {9}
    config_file.write_text(config_file.read_text().replace("epochs = 1", "epochs = 1\nseed = 1"))
    assert load_config(config_file).train.seed == 1
    assert load_config(config_file, ["seeds=[5]"]).train.seed == 5
    with pytest.raises(ConfigError, match=r"train\.seed is 1, but compare\.SGD\.seeds are \[5\]"):
        load_comparison(config_file, ["compare.SGD.seeds=[5]"])


def test_nothing_to_compare(config_file):
    config_file.write_text(config_file.read_text().partition("[[compare]]")[0])
    with pytest.raises(ConfigError, match="nothing to compare"):
        load_comparison(config_file)
