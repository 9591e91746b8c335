"""Settings and records that are made to fail: one sentence, nothing lost."""

from __future__ import annotations

import pytest

from rootfree_lab.config_files import load_config
from rootfree_lab.config_reading import ConfigError
from rootfree_lab.devices import choose_device
from rootfree_lab.records import append_record, read_records

DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"a = {DEEP}", "nested too deeply"),
        ("a" + ".a" * 100_000 + " = 1", "more than 1,000 parts"),
        ("[a" + ".a" * 100_000 + "]", "more than 1,000 parts"),
    ],
    ids=["deep", "a long key", "a long table"],
)
def test_files(config_file, line, message):
    config_file.write_text(f"{line}\n{config_file.read_text()}")
    with pytest.raises(ConfigError, match=message):
        load_config(config_file)


def test_assignments(config_file):
    with pytest.raises(ConfigError, match="--set label: its value is nested too deeply"):
        load_config(config_file, [f"label={DEEP}"])


def test_a_device_without_numbers():
    with pytest.raises(ConfigError, match=r"train\.device must be auto, cpu or cuda, got 'meta'"):
        choose_device("meta")


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
