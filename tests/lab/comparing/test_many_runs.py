"""`compare --jobs`: runs side by side in processes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lab.stand_in_pool import StandInPool
from rootfree_lab.cli.app import app
from rootfree_lab.comparing import many_runs
from rootfree_lab.config.files import load_comparison
from rootfree_lab.data import DataError
from rootfree_lab.files.records import read_records
from rootfree_lab.processes.side_by_side import Event
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.training.run import failure, records_path


@pytest.mark.slow
def test_side_by_side_gives_what_one_by_one_gives(tmp_path, config_file, comparable):
    found = {}
    for jobs in "12":
        out = tmp_path / jobs
        arguments = ["compare", str(config_file), "--out", str(out), "--jobs", jobs]
        arguments += ["--set", "seeds=[1]"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "AdamW v1.5 seed 1 · step 5/5" in result.output
        assert "AdamW v1.5 seed 1 · done" in result.output
        records = read_records(records_path(out))
        found[jobs] = sorted((comparable(r) for r in records), key=lambda r: r["identity"])
    assert len(found["1"]) == 2
    assert found["1"] == found["2"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("foo"), "KeyError: 'foo'"),
        (AssertionError(), "AssertionError"),
        (DataError("b"), "b"),
    ],
)
def test_what_stopped_a_run_is_said(error, said):
    assert failure("error", error) == {"kind": "error", "message": said}


class Pretending(StandInPool):
    """A pool whose workers do what the test says."""

    script: dict[str, list] = {}
    submitted: list = []

    def submit(self, item):
        super().submit(item)
        self.submitted.append((item[0].label, item[2], len(self.items)))

    def retire_idle(self):
        self.submitted.append("retired")

    def ask_to_stop(self):
        for item in self.items:
            self.script[item[0].label] = [("done", Interrupted)]

    def events(self, seconds):
        item = self.items.pop(0)
        kind, content = self.script[item[0].label].pop(0)
        return [Event(kind, item, content)]


@pytest.fixture
def pretend(monkeypatch, tmp_path, config_file):
    monkeypatch.setattr(many_runs, "Pool", Pretending)
    monkeypatch.setattr(Pretending, "submitted", [])
    runs = load_comparison(config_file, ["seeds=[0]"])

    def pretend(script, stop=None):
        monkeypatch.setattr(Pretending, "script", script)
        said: list[str] = []
        ended = many_runs.side_by_side(
            runs, out=tmp_path, jobs=2, stop=stop, tell=lambda run, text: said.append(text)
        )
        return {run.label: record for run, record in ended}, said

    return pretend


def test_a_run_without_memory_waits_until_it_is_alone(pretend):
    records, said = pretend(
        {
            "SGD": [("done", many_runs.CrowdedOut), ("done", {"a": 1})],
            "AdamW v1.5": [("done", {"b": 2})],
        }
    )
    assert records == {"SGD": {"a": 1}, "AdamW v1.5": {"b": 2}}
    # (label, beside others, how many at the time)
    assert Pretending.submitted == [
        ("SGD", True, 1), ("AdamW v1.5", True, 2), "retired", "retired", ("SGD", False, 1),
    ]  # fmt: skip
    assert "no memory" in said[0]


def test_a_run_whose_process_dies_is_recorded_as_failed(pretend, tmp_path):
    records, _ = pretend(
        {"SGD": [("died", "its process was ended by SIGKILL")], "AdamW v1.5": [("done", {"b": 2})]}
    )
    assert records["SGD"]["failure"]["message"] == "its process was ended by SIGKILL"
    assert [r["label"] for r in read_records(records_path(tmp_path))] == ["SGD"]


def test_a_signal_stops_all(pretend):
    stop = StopSignals()

    class Once(dict):
        def __getitem__(self, key):
            stop.received = 2
            return super().__getitem__(key)

    with pytest.raises(Interrupted):
        pretend(Once({"SGD": [("done", {"a": 1})], "AdamW v1.5": []}), stop)
    assert len(Pretending.submitted) == 2


def test_want_of_memory_is_told_from_other_errors(monkeypatch, tmp_path, make_config):
    import torch

    from rootfree_lab.training.watching.progress import Watcher

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(many_runs, "train_or_resume", fail)
    with pytest.raises(many_runs.CrowdedOut):
        many_runs.carry_out(make_config(), tmp_path, None, Watcher(), crowded=True)
    record = many_runs.carry_out(make_config(), tmp_path, None, Watcher())
    assert "out of memory" in record["failure"]["message"]
