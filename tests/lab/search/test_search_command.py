"""`rootfree search` as a user runs it: real processes, real kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rootfree_lab.cli import terminal
from rootfree_lab.cli.app import app
from rootfree_lab.config import needed
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.files.records import read_records
from rootfree_lab.search import dashboard
from rootfree_lab.search.ledger import Ledger
from rootfree_lab.search.settings import load_entries
from rootfree_lab.search.storage import open_storage
from rootfree_lab.training.run import records_path

COMMAND = "from rootfree_lab.cli import main; main()"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*arguments):
    return CliRunner().invoke(app, ["search", *map(str, arguments)])


@pytest.fixture(autouse=True)
def wide_console(monkeypatch) -> None:
    monkeypatch.setattr(terminal, "console", Console(width=200))


@pytest.fixture
def start():
    """Start a search in a process of its own."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "search", *map(str, arguments)],
            env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def results_of(journal, config_file, *assignments):
    """Trial -> Optuna's number of the attempt that counts."""
    ledger = Ledger(open_storage(str(journal)), "tiny", load_entries(config_file, assignments))
    return ledger, {
        status.slot.name: status.result.trial.number
        for label in ledger.entries
        for status in ledger.statuses(label)
        if status.result is not None
    }


@pytest.mark.slow
def test_two_searches_on_one_journal_and_kill_9(tmp_path, config_file, start):
    """One of two is killed in the middle of a trial; the other one carries out all the rest."""
    journal = tmp_path / "journal.log"
    slow = ("train.epochs=400", "train.eval_every=200", "search.trials=[2, 1]")
    sets = [part for each in slow for part in ("--set", each)]
    arguments = (config_file, "--storage", journal, *sets)
    first, second = (start(*arguments, "--out", tmp_path / name) for name in ("first", "second"))
    patience = time.monotonic() + 120
    done: dict[str, int] = {}
    while len(done) < 2 and time.monotonic() < patience:
        time.sleep(0.1)
        if journal.exists():
            done = results_of(journal, config_file, *slow)[1]
    first.kill()
    said = second.communicate(timeout=120)[0]
    assert second.returncode == 0, said
    ledger, after = results_of(journal, config_file, *slow)
    assert len(after) == 6
    assert {name: after[name] for name in done} == done  # what was finished is still that
    finished = Counter(
        (a.slot, bool(a.record))
        for label in ledger.entries
        for status in ledger.statuses(label)
        for a in status.attempts
    )
    assert all(finished[slot, True] == 1 for slot, _ in finished)  # each trained through once
    # The one that is left has all records, those of the killed one too.
    assert {r["label"] for r in read_records(records_path(tmp_path / "second"))} == set(after)
    # Its worker is gone as well: it closes its end of what this test reads.
    assert first.communicate(timeout=30)[0] is not None
    again = run(*arguments, "--out", tmp_path / "second")
    assert again.exit_code == 0
    assert results_of(journal, config_file, *slow)[1] == after


def test_a_finished_search_tells_its_best(tmp_path, config_file, monkeypatch):
    """No process is needed for what is done."""
    from rootfree_lab.search import loop

    settings = ["--set", "search.trials=[1, 0]", "--out", tmp_path / "out", "--only", "SGD"]
    entries = load_entries(config_file, ["search.trials=[1, 0]"])[:1]
    (tmp_path / "out").mkdir()
    ledger = Ledger(open_storage(str(tmp_path / "out/journal.log")), "tiny", entries)
    final = {"test_error": 0.125, "test_loss": 1.0, "train_loss": 1.0}
    made = {"completed": True, "final": final, "identity": "x", "label": "SGD 1.0"}
    ledger.conclude(ledger.claim(alone=True), made)
    monkeypatch.setattr(loop.Pool, "submit", None)
    result = run(config_file, *settings)
    assert result.exit_code == 0, result.output
    assert "0.125" in result.output
    assert "best.toml; final runs: rootfree compare" in result.output
    assert read_records(records_path(tmp_path / "out")) == [made]


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("optuna", [], "rootfree search needs optuna: pip install 'rootfree[search]'"),
        ("optuna_dashboard", ["--dashboard"], "--dashboard needs optuna_dashboard"),
    ],
)
def test_a_missing_package_is_named_before_anything_happens(
    tmp_path, config_file, monkeypatch, module, arguments, said
):
    monkeypatch.setattr(needed, "find_spec", lambda name: None if name == module else 1)
    result = run(config_file, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert not (tmp_path / "out").exists()


def test_optuna_is_not_imported_by_the_rest_of_the_laboratory():
    program = (
        "import sys, json; from rootfree_lab.comparing import compare, many_runs; "
        "from rootfree_lab.cli import app; print(json.dumps('optuna' in sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert json.loads(said.stdout) is False, said.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "Adam"], "did you mean 'AdamW'"),
        (["--set", "search.spaces.AdamW.lr=[1, 0.1]"], "must have low < high"),
        (["--storage", "nothing://host/x"], "the storage nothing://host/x"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, config_file, arguments, said):
    result = run(config_file, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_the_dashboard_listens_on_this_machine_alone(tmp_path, monkeypatch):
    served = []

    def wsgi(storage):
        served.append(storage)

        def app(environment, start_response):
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [environment["PATH_INFO"].encode()]

        return app

    monkeypatch.setitem(sys.modules, "optuna_dashboard", SimpleNamespace(wsgi=wsgi))
    address = dashboard.serve(str(tmp_path / "journal.log"), 0)
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.read() == b"/dashboard"
    assert len(served) == 1
    port = int(address.split(":")[2].partition("/")[0])
    with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1"):
        dashboard.serve(str(tmp_path / "journal.log"), port)
