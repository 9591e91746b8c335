"""The loop of a search, its trials carried out in this process by a pool that pretends."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
import torch
from filelock import Timeout
from optuna.exceptions import StorageInternalError

from lab.search.inline_pool import Inline, work_inline
from rootfree_lab.config.files import load_comparison, read_tables
from rootfree_lab.config.reading import ConfigError, read_toml
from rootfree_lab.files.records import read_records
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.search import loop, results, trials
from rootfree_lab.search.attempts import best
from rootfree_lab.search.ledger import Ledger
from rootfree_lab.search.settings import Claim, Slot, load_entries
from rootfree_lab.search.storage import in_words, open_storage
from rootfree_lab.training import run as training_run
from rootfree_lab.training.run import records_path


@pytest.fixture
def run(tmp_path, config_file, monkeypatch):
    """Search with the pretending pool; the ledger, the folder, and what was said."""
    work_inline(monkeypatch)

    def run(*assignments, jobs=2, stop=None):
        out, said = tmp_path / "out", []
        storage = open_storage(str(tmp_path / "journal.log"))
        ledger = Ledger(storage, "s", load_entries(config_file, assignments))

        def say(claim, kind, content):
            said.append((claim.slot.name, kind, content))
            if kind == "ended":
                tables = read_tables(config_file, assignments)
                results.write_best(ledger, tables, out)

        loop.search(ledger, out=out, jobs=jobs, stop=stop or StopSignals(), say=say)
        return ledger, out, said

    return run


def names(said, kind):
    return [name for name, what, _ in said if what == kind]


def test_trials_on_record_are_handed_over_and_not_trained_again(run, tmp_path, monkeypatch):
    """As where a journal was lost, or a search has a new name in the same folder."""
    _, out, _ = run()
    before = read_records(records_path(out))
    (tmp_path / "journal.log").unlink()
    monkeypatch.setattr(training_run, "_train", None)
    ledger, _, said = run()
    assert len(names(said, "ended")) == 10
    assert read_records(records_path(out)) == before
    assert ledger.finished()


def test_a_space_of_few_choices_repeats_settings(run):
    """What came out is known from the second time on; each trial has its record."""
    fixed = "lr = { choices = [0.1, 0.01] }, momentum = 'fixed', weight_decay = 'fixed'"
    _, out, said = run(f"search.spaces.SGD={{ {fixed} }}")
    assert len(names(said, "ended")) == 10
    assert [r["label"] for r in read_records(records_path(out))] == names(said, "ended")


def test_a_spoilt_records_file_is_not_blamed_on_the_journal(run):
    _, out, _ = run()
    path = records_path(out)
    path.write_text("nothing\n" + path.read_text())
    told = re.escape(f"{path}, line 1: not a JSON record")
    with pytest.raises(ConfigError, match=f"^{told}"), in_words("journal.log"):
        read_records(path)


def test_a_trial_that_leaves_no_record_has_failed(run, monkeypatch):
    monkeypatch.setattr(trials, "train_or_resume", lambda *_, **__: None)
    ledger, _, said = run()
    assert len(names(said, "failed")) >= 10
    assert all("it ended without a record" in why for _, kind, why in said if kind == "failed")
    assert ledger.finished()


def test_a_search_trains_every_trial_and_leaves_what_compare_takes(run, config_file):
    ledger, out, said = run()
    assert len(names(said, "ended")) == 10
    records = read_records(records_path(out))
    assert [r["label"] for r in records] == names(said, "ended")
    assert all(r["completed"] for r in records)
    # Each point was reported, and the last one is the measure.
    for label in ledger.entries:
        for status in ledger.statuses(label):
            trial = status.result.trial
            assert list(trial.intermediate_values) == [1, 2]
            assert trial.intermediate_values[2] == trial.value == status.value
    found = best(ledger.statuses("AdamW"))
    assert found.value == min(r["final"]["test_error"] for r in records if "Adam" in r["label"])
    runs = load_comparison(out / results.BEST)
    assert [(r.label, r.train.seed) for r in runs] == [
        ("SGD", 0), ("SGD", 1), ("AdamW", 0), ("AdamW", 1),
    ]  # fmt: skip
    assert runs[2].optimizer.options == found.result.settings
    assert runs[0].optimizer.options["momentum"] == 0.9  # fixed
    narrowed = load_entries(out / results.BEST)
    assert narrowed[0].space == ledger.space("SGD", 2, ledger.statuses("SGD"))
    # Once more: nothing is left to do, and nothing is done.
    assert run()[2] == []
    assert len(read_records(records_path(out))) == 10


def test_the_best_settings_of_entries_that_are_not_searched_now_stay(run, config_file, tmp_path):
    """As with `--only`: the file still has them, in the order of the config."""
    ledger, out, _ = run()
    path = out / results.BEST
    before = path.read_text(encoding="utf-8")
    storage = open_storage(str(tmp_path / "journal.log"))
    alone = Ledger(storage, "s", [ledger.entries["AdamW"]])
    results.write_best(alone, read_tables(config_file), out)
    assert path.read_text(encoding="utf-8") == before
    # An entry that the config no longer has goes.
    tables = read_tables(config_file)
    tables["compare"] = [entry for entry in tables["compare"] if entry["label"] == "AdamW"]
    results.write_best(alone, tables, out)
    assert [entry["label"] for entry in read_toml(path)["compare"]] == ["AdamW"]
    assert "SGD" not in path.read_text(encoding="utf-8")


def test_own_code_is_named_by_its_way_from_the_folder(run, config_file):
    """So `best.toml` can be taken to another machine with the project."""
    code = (
        "from rootfree_lab.models.small import logistic\ndef net(dataset): return logistic(dataset)"
    )
    file = config_file.parent / "net.py"
    file.write_text(code, encoding="utf-8")
    _, out, _ = run("search.trials=[1, 0]", "model.name=net.py:net")
    assert read_toml(out / results.BEST)["model"]["name"] == "../net.py:net"
    assert load_comparison(out / results.BEST)[0].model.name == f"{file.resolve()}:net"


def test_records_of_other_machines_are_added(run, tmp_path):
    ledger, out, _ = run("search.trials=[1, 0]")
    records_path(out).unlink()
    results.write_records(ledger, out)
    results.write_records(ledger, out)
    assert len(read_records(records_path(out))) == 2


def test_a_trial_that_diverges_is_pruned_and_said_to_be(run):
    ledger, out, said = run(
        "search.trials=[1, 0]", "search.spaces.SGD.lr=[1e37, 1e38]", "train.epochs=4"
    )
    (status,) = ledger.statuses("SGD")
    assert status.result.outcome == "diverged"
    (record,) = [c for name, kind, c in said if kind == "ended" and name == "SGD 1.0"]
    assert record["failure"]["kind"] == "diverged"
    written = read_toml(out / results.BEST)
    assert [entry["label"] for entry in written["compare"]] == ["AdamW"]


def test_a_hopeless_trial_is_stopped_and_recorded(run, monkeypatch):
    answers = iter(["go on", "prune"])
    monkeypatch.setattr(Ledger, "report", lambda *_: next(answers, "go on"))
    ledger, out, _ = run("search.trials=[1, 0]", "train.epochs=3")
    (status,) = ledger.statuses("SGD")
    assert status.result.outcome == "pruned"
    assert status.result.record["steps"] == 2
    assert not list((out / "checkpoints").glob("*")) if (out / "checkpoints").exists() else True


def test_an_error_of_one_trial_leaves_the_others(run, monkeypatch):
    real = trials.train_or_resume

    def failing(config, **options):
        if config.label == "SGD 1.1":
            raise RuntimeError("no kernel for this\nand more")
        return real(config, **options)

    monkeypatch.setattr(trials, "train_or_resume", failing)
    ledger, _, said = run("search.trials=[2, 0]")
    assert [(n, c) for n, kind, c in said if kind == "failed"] == [
        ("SGD 1.1", "RuntimeError: no kernel for this")
    ]
    assert len(names(said, "ended")) == 3
    assert ledger.finished()


@pytest.mark.parametrize("enough_alone", [True, False])
def test_a_trial_without_memory_is_tried_again_alone(run, monkeypatch, enough_alone):
    real, beside = trials.train_or_resume, []

    def greedy(config, **options):
        if config.label == "SGD 1.0":
            beside.append(len(Inline.handler.__self__._pool.running) - 1)
            if beside[-1] or not enough_alone:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(config, **options)

    monkeypatch.setattr(trials, "train_or_resume", greedy)
    ledger, _, said = run("search.trials=[2, 1]")
    assert beside == [1, 0]
    # Where it failed, and before it is alone: nobody keeps memory that nobody works with.
    assert Inline.retired[:2] == [["AdamW 1.0"], []]
    failures = [c for name, kind, c in said if kind == "failed"]
    assert "tried again, alone" in failures[0]
    assert len(failures) == (1 if enough_alone else 2)
    assert len(names(said, "ended")) == (6 if enough_alone else 5)
    assert ledger.finished()


def test_a_trial_whose_process_dies_is_tried_again(run, monkeypatch):
    monkeypatch.setattr(Inline, "died", {"SGD 1.0": 1, "AdamW 1.1": 2})
    ledger, _, said = run("search.trials=[2, 0]")
    assert names(said, "failed") == ["SGD 1.0", "AdamW 1.1", "AdamW 1.1"]
    assert sorted(names(said, "ended")) == ["AdamW 1.0", "SGD 1.0", "SGD 1.1"]
    assert ledger.finished()


def test_nothing_runs_beside_a_trial_that_has_to_be_alone(tmp_path):
    """Not even what becomes free meanwhile, such as the trial of another machine that died."""
    lonely = Claim(Slot("SGD", 1, 0), 1, SimpleNamespace(label="lonely"), alone=True)
    freed = Claim(Slot("SGD", 1, 1), 2, SimpleNamespace(label="freed"), alone=False)
    others = [None, freed, None]

    def claim(*, alone, crowded_out=False):
        return lonely if crowded_out else others.pop(0)

    pool = Inline(None, 2)
    filling = loop._Loop(
        SimpleNamespace(claim=claim), pool, tmp_path, lambda *_: None, StopSignals()
    )
    for _ in range(2):
        filling.fill()
        assert [claim.config.label for claim, _ in pool.items] == ["lonely"]
    pool.items.clear()
    filling.fill()
    assert [claim.config.label for claim, _ in pool.items] == ["freed"]


def test_a_process_that_ends_when_asked_to_stop_has_not_died(
    run, monkeypatch, tmp_path, config_file
):
    stop = StopSignals()
    monkeypatch.setattr(Inline, "died", {"SGD 1.0": 1, "AdamW 1.0": 1})
    monkeypatch.setattr(Inline, "submit", lambda self, item: self.items.append(item) or ask(stop))

    def ask(stop):
        stop.received = 15

    with pytest.raises(Interrupted):
        run("search.trials=[1, 0]", stop=stop)
    entries = load_entries(config_file, ["search.trials=[1, 0]"])
    ledger = Ledger(open_storage(str(tmp_path / "journal.log")), "s", entries)
    outcomes = [
        a.outcome for label in ledger.entries for s in ledger.statuses(label) for a in s.attempts
    ]
    assert set(outcomes) == {"interrupted"}


def test_asked_to_stop_it_leaves_the_rest(run):
    stop = StopSignals()
    stop.received = 15
    with pytest.raises(Interrupted):
        run("search.trials=[1, 0]", stop=stop)
    assert len(names(run("search.trials=[1, 0]")[2], "ended")) == 2


def test_a_storage_that_is_away_for_a_while_loses_nothing(run, monkeypatch):
    slept, troubles = [], [OSError("gone"), Timeout("busy"), StorageInternalError("restarting")]
    monkeypatch.setattr("rootfree_lab.search.storage.time", SimpleNamespace(sleep=slept.append))
    real = Ledger.conclude

    def away(self, *arguments):
        kept = len(troubles) > 1 or real(self, *arguments)  # the last time the answer is lost
        if troubles:
            raise troubles.pop(0)
        return kept

    monkeypatch.setattr(Ledger, "conclude", away)
    _, out, said = run("search.trials=[1, 0]")
    assert slept == [1, 2, 4]
    assert len(names(said, "ended")) == 2
    assert len(read_records(records_path(out))) == 2


def test_a_result_that_comes_too_late_is_said_to(run, monkeypatch):
    real, once = Ledger.conclude, []

    def late(self, claim, record):
        if not once:
            once.append(claim.slot.name)
            self.fail(claim, "abandoned", "taken for dead")
        return real(self, claim, record)

    monkeypatch.setattr(Ledger, "conclude", late)
    ledger, _, said = run("search.trials=[1, 0]")
    assert [n for n, kind, text in said if kind == "failed" and "for dead" in text] == once
    assert sorted(names(said, "ended")) == ["AdamW 1.0", "SGD 1.0"]
    assert ledger.finished()


def test_a_beating_heart_survives_a_storage_that_does_not_answer(monkeypatch):
    beats = []

    class Sick:
        def beat(self):
            beats.append(1)
            raise OSError("down")

    monkeypatch.setattr(loop, "_BEAT", 0.001)
    with loop._beating(Sick()):
        patience = time.monotonic() + 10
        while len(beats) < 2 and time.monotonic() < patience:
            time.sleep(0.001)
    assert len(beats) >= 2
