"""Settings and records that are made to fail: one sentence, nothing lost."""

from __future__ import annotations

import pytest
import torch

from rootfree_lab import optimizers
from rootfree_lab.config.files import load_comparison, load_config
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.files.records import append_record, read_records
from rootfree_lab.training.devices import choose_device

DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"a = {DEEP}", "nested too deeply"),
        ("a" + ".a" * 100_000 + " = 1", "nested too deeply"),
        ("[a" + ".a" * 100_000 + "]", "nested too deeply"),
        ("a = { a" + ".a" * 100_000 + " = 1 }", "nested too deeply"),
        (f"a = {'9' * 5000}", "not valid TOML"),
    ],
    ids=["deep", "a long key", "a long table", "a long key inside", "many digits"],
)
def test_files(config_file, line, message):
    config_file.write_text(f"{line}\n{config_file.read_text()}")
    with pytest.raises(ConfigError, match=message):
        load_config(config_file)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (f"label={DEEP}", "--set label: its value is nested too deeply"),
        ("label={ a" + ".a" * 40_000 + " = 1 }", "--set label: its value is nested too deeply"),
        ("optimizer" + ".a" * 40_000 + "=1", "got a name of 40,001 parts"),
        (f"train.seed={'9' * 5000}", "--set train.seed"),
        (f"train.seed={2**32}", r"train\.seed must be from 0 to 4294967295, got 4294967296"),
        (f"train.seed={2**63}", r"train\.seed must be from 0 to 4294967295"),
    ],
    ids=["deep", "a long key inside", "a long name", "many digits", "33 bits", "64 bits"],
)
def test_assignments(config_file, assignment, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config_file, [assignment])


def test_seeds_of_a_comparison(config_file):
    with pytest.raises(ValueError, match="seed must be from 0 to 4294967295"):
        load_comparison(config_file, [f"seeds=[{2**32}]"])


def test_seeds_that_torch_takes_for_one_another():
    """The reason for the limit: of a larger seed, the lower half counts."""
    drawn = [
        torch.rand(3, generator=torch.Generator().manual_seed(s)) for s in (1, 2**32 + 1, 2**32 - 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("name", ["meta", "xla", "hpu", "CPU", "", "cpu:x"])
def test_a_device_that_is_none(name):
    """Without numbers, in other builds of torch, or unknown."""
    with pytest.raises(
        ConfigError, match=rf"train\.device must be auto, cpu or cuda, got '{name}'"
    ):
        choose_device(name)


def test_the_number_of_terms_is_no_option_of_the_optimizer():
    with pytest.raises(ConfigError, match=r"optimizer\.batch_size must not be given, got 0: B is"):
        optimizers.check("RFAdamW", {"batch_size": 0})


def test_records_that_are_nested_too_deeply(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, {"a": 1})
    with path.open("a") as file:
        file.write("[" * 100_000)  # a last line without an end: a killed writer's
    assert read_records(path) == [{"a": 1}]
    append_record(path, {"b": 2})
    assert read_records(path) == [{"a": 1}, {"b": 2}]
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="line 1: not a JSON record"):
        read_records(path)
