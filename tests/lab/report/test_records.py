"""Records in every state in which a machine leaves them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from lab.report.fake_records import comparison, record, write
from rootfree_lab.report.experiments import arrange
from rootfree_lab.report.records import ReportError, read


def runs_of(tmp_path, *contents, tail=""):
    return read(write(tmp_path / "records.jsonl", list(contents), tail=tail))


def test_a_record(tmp_path):
    content = record("IFShampoo", seed=3)
    (run,), problems = runs_of(tmp_path, content)
    assert problems == []
    assert (run.label, run.data, run.model, run.seed) == ("IFShampoo", "cifar10", "resnet34", "3")
    assert run.status == "completed"
    assert run.final == content["final"]
    assert run.seconds == content["seconds"]
    assert run.curve["test_loss"].tolist() == [point["test_loss"] for point in content["curve"]]
    assert run.source == "records.jsonl, line 1"


def test_torn_and_foreign_lines_are_left_out_and_named(tmp_path):
    file = write(tmp_path / "records.jsonl", [record()])
    middle = b"not json\n[1, 2]\n\n\xff\xfe\n" + json.dumps(record(seed=1)).encode() + b"\n"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes() + middle + b'{"label": "Ada')
    runs, problems = read(file)
    assert [run.seed for run in runs] == ["0", "1"]
    assert problems == [
        "records.jsonl, line 2: not JSON",
        "records.jsonl, line 3: not a record (a JSON object)",
        "records.jsonl, line 5: not JSON",
        "records.jsonl, line 7: cut off in the middle",
    ]


def test_a_last_line_without_its_line_break_is_whole(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record()), encoding="utf-8")
    runs, problems = read(file)
    assert (len(runs), problems) == (1, [])


def test_a_folder_is_read_with_all_below_it(tmp_path):
    write(tmp_path / "b" / "records.jsonl", [record(seed=1)])
    write(tmp_path / "a.jsonl", [record(seed=0)])
    runs, _ = read(tmp_path)
    assert [run.source for run in runs] == ["a.jsonl, line 1", "b/records.jsonl, line 1"]


def test_nothing_to_read_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ReportError, match=r"there is no file \*\.jsonl in the folder"):
        read(tmp_path)
    with pytest.raises(ReportError, match=r"there is no file or folder .*missing"):
        read(tmp_path / "missing")
    empty = tmp_path / "records.jsonl"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(ReportError, match="there are no records in"):
        read(empty)
    empty.write_text('{"lab', encoding="utf-8")
    with pytest.raises(ReportError, match="line 1: cut off in the middle"):
        read(empty)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"curve": None, "final": None, "seconds": None, "memory": None, "config": None},
        {"curve": {"a": 1}, "final": [], "seconds": 3, "memory": "x", "config": [], "versions": 1},
        {"curve": [None, 1, {}], "final": {"train_loss": "low"}, "steps": True, "label": {}},
        {"curve": [{"step": 10**400, "train_loss": [1]}], "seed": [1], "label": "\n\t\0"},
    ],
)
def test_missing_and_odd_fields_are_missing_values(tmp_path, content):
    (run,), _ = runs_of(tmp_path, content)
    assert run.label == "(no label)"
    assert run.status == "incomplete"
    assert all(math.isnan(value) for value in run.final.values())
    assert math.isnan(run.steps)


def test_names_are_found_in_the_config_too(tmp_path):
    content = record("SGD", seed=4)
    for key in ("label", "data", "model", "optimizer", "seed"):
        del content[key]
    (run,), _ = runs_of(tmp_path, content)
    assert (run.label, run.data, run.model, run.seed) == ("SGD", "cifar10", "resnet34", "4")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "NaN", "-Infinity"])
def test_a_run_is_over_where_a_loss_is_no_number(tmp_path, bad):
    content = record()
    content["curve"][4]["train_loss"] = bad
    content["final"]["train_loss"] = bad
    (run,), _ = runs_of(tmp_path, content)
    assert run.status == "diverged"
    assert np.isfinite(run.curve["test_error"][:4]).all()
    assert np.isinf(run.curve["test_error"][4:]).all()


def test_other_ways_to_say_that_a_run_diverged(tmp_path):
    told = record(completed=False, failure={"kind": "diverged", "message": "not finite by step 9"})
    stopped = record(completed=False, failure={"kind": "error", "message": "no memory"})
    null = record()
    null["final"] = {"train_loss": 0.1, "test_loss": None, "test_error": None}
    text = record(data="sotu")  # has no test error from the start
    runs, _ = runs_of(tmp_path, told, stopped, null, text)
    assert [run.status for run in runs] == ["diverged", "incomplete", "diverged", "completed"]


def test_without_final_values_the_curve_tells(tmp_path):
    content = record()
    del content["final"]
    (run,), _ = runs_of(tmp_path, content)
    assert run.final["test_error"] == content["curve"][-1]["test_error"]


def test_experiments_and_groups(tmp_path):
    runs, _ = runs_of(tmp_path, *comparison())
    experiments, repeated = arrange(runs)
    assert [e.name for e in experiments] == ["resnet34 on cifar10", "vit_tiny on cifar100"]
    assert [len(g.runs) for e in experiments for g in e.groups] == [3] * 10
    assert [g.failed for g in experiments[0].groups] == [0, 1, 0, 0, 0]
    assert [g.failed for g in experiments[1].groups] == [0, 0, 0, 1, 0]
    assert repeated == set()
    assert experiments[0].differences == ()


def test_one_label_with_two_settings_is_two_groups(tmp_path):
    other = record(seed=1)
    other["config"]["optimizer"]["lr"] = 0.5
    runs, _ = runs_of(tmp_path, record(), other)
    ((experiment,), _) = arrange(runs)
    assert [g.label for g in experiment.groups] == ["AdamW (lr=0.001)", "AdamW (lr=0.5)"]
    assert experiment.differences == ()


def test_what_differs_beside_the_optimizer_is_told(tmp_path):
    versions = {**record()["versions"], "device": "cuda", "torch": "2.12.0"}
    unstarted = record("SGD", seed=7, steps=0, curve=[], final={}, versions={"device": "tpu"})
    runs, _ = runs_of(
        tmp_path,
        record(),
        record("SGD", epochs=10),
        record("Shampoo", versions=versions),
        unstarted,
    )
    ((experiment,), _) = arrange(runs)
    assert experiment.differences == ("train.epochs", "version of torch", "device")


def test_a_repeated_seed_counts_once(tmp_path):
    stopped = record(completed=False)
    runs, _ = runs_of(tmp_path, stopped, record(), record(seed=1), stopped)
    ((experiment,), repeated) = arrange(runs)
    (group,) = experiment.groups
    assert [run.source for run in group.runs] == ["records.jsonl, line 2", "records.jsonl, line 3"]
    assert repeated == {"records.jsonl, line 1", "records.jsonl, line 4"}


def test_headline(tmp_path):
    runs, _ = runs_of(tmp_path, record(), record(data="sotu", model="lstm"))
    experiments, _ = arrange(runs)
    assert [e.headline for e in experiments] == ["test_error", "test_loss"]
