"""Several processes with one output folder: each run is trained once, and recorded once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from rootfree_lab.config.files import load_config
from rootfree_lab.files import run_lock
from rootfree_lab.files.checkpoints import checkpoint_path, file_name
from rootfree_lab.files.records import append_record, read_records
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.training.run import records_path, train


@pytest.mark.parametrize("resume", [True, False])
def test_who_comes_second_waits_and_returns_the_record(tmp_path, make_config, capfd, resume):
    config, found = make_config(steps=4), []
    with run_lock.alone(tmp_path, config) as waited:
        assert not waited
        second = threading.Thread(
            target=lambda: found.append(train(config, out=tmp_path, resume=resume))
        )
        second.start()
        second.join(0.5)
        assert second.is_alive()
        record = train(config, out=tmp_path / "elsewhere")
        append_record(records_path(tmp_path), record)
    second.join(60)
    assert found == read_records(records_path(tmp_path))  # one record
    assert found[0]["final"] == record["final"]
    assert "another process trains" in capfd.readouterr().err


def test_a_run_that_has_a_record_is_not_resumed(tmp_path, make_config):
    """The other process may have finished between a look at the records and the start."""
    config = make_config(steps=4)
    train(config, out=tmp_path)
    train(config, out=tmp_path, resume=True)
    assert len(read_records(records_path(tmp_path))) == 1


def test_a_signal_ends_the_waiting(tmp_path, make_config):
    config, stop = make_config(), StopSignals()
    stop.received = 15
    with run_lock.alone(tmp_path, config), pytest.raises(Interrupted):
        train(config, out=tmp_path, stop=stop)


@pytest.mark.parametrize(
    ("one", "other"), [("lr 1", "lr/1"), ("x" * 241, "x" * 240 + "y"), ("é", "è"), ("", ".")]
)
def test_labels_that_look_alike_have_files_of_their_own(tmp_path, make_config, one, other):
    """Runs with other settings, that is: with the same ones they are one run."""
    configs = [replace(make_config(steps=n), label=x) for n, x in ((4, one), (5, other))]
    paths = [checkpoint_path(tmp_path, config) for config in configs]
    assert paths[0] != paths[1]
    for path in paths:
        assert path.parent == tmp_path / "checkpoints"
        path.parent.mkdir(exist_ok=True)
        path.with_name(f"{path.name}.4194304.tmp").touch()  # as long as a name becomes
    assert all(name.isascii() for name in map(file_name, configs))


@pytest.mark.slow
def test_processes_with_one_folder_record_each_run_once(tmp_path, config_file):
    """They used to leave two records, or to end each other."""
    out = tmp_path / "out"
    command = "from rootfree_lab.cli import main; main()"
    arguments = ["train", str(config_file), "--out", str(out), "--resume"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", command, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
    (record,) = read_records(records_path(out))
    assert record["identity"] == load_config(config_file).identity()
    assert not checkpoint_path(out, load_config(config_file)).exists()
