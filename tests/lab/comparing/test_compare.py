"""Comparisons and the command line, end to end on digits."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rootfree_lab.cli import terminal
from rootfree_lab.cli.app import app
from rootfree_lab.comparing import compare
from rootfree_lab.config.files import load_comparison, load_config
from rootfree_lab.files import checkpoints
from rootfree_lab.files.checkpoints import checkpoint_path
from rootfree_lab.files.records import read_records
from rootfree_lab.report.experiments import arrange
from rootfree_lab.report.records import read
from rootfree_lab.training import session
from rootfree_lab.training.run import records_path


@pytest.fixture(autouse=True)
def wide_console(monkeypatch):
    monkeypatch.setattr(terminal, "console", Console(width=200))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_train_records_one_run(tmp_path, config_file):
    result = run("train", config_file, "--out", tmp_path, "--set", "optimizer.lr=0.05")
    assert result.exit_code == 0, result.output
    (record,) = read_records(records_path(tmp_path))
    assert record["completed"] is True
    assert record["config"]["optimizer"] == {"name": "SGD", "lr": 0.05}
    assert (record["label"], record["seed"], record["steps"]) == ("SGD", 0, 5)
    assert (record["data"], record["model"], record["optimizer"]) == ("digits", "small_cnn", "SGD")
    (point,) = record["curve"]
    assert point["step"] == 5
    assert point["epoch"] == 1
    assert point["lr"] == 0.05
    assert record["final"] == {k: point[k] for k in ("train_loss", "test_loss", "test_error")}
    assert 0 <= point["test_error"] <= 1
    assert record["memory"]["parameters"] > 0
    assert record["memory"]["peak_bytes"] is None or record["memory"]["peak_bytes"] > 2**20
    assert set(record["versions"]) == {"rootfree", "torch", "python", "device"}
    assert "step 5/5" in result.output
    assert "images/s" in result.output
    assert "accuracy" in result.output

    for resume in ([], ["--resume"]):
        again = run("train", config_file, "--out", tmp_path, "--set", "optimizer.lr=0.05", *resume)
        assert again.exit_code == 0
        assert "already" in again.output
        assert f"test loss {point['test_loss']:.4f}" in again.output
        assert len(read_records(records_path(tmp_path))) == 1


def test_train_says_what_it_does_about_checkpoints(tmp_path, config_file):
    result = run("train", config_file, "--out", tmp_path, "--resume")
    assert result.exit_code == 0
    assert "starts from the beginning" in result.output
    path = checkpoint_path(tmp_path, load_config(config_file, ["train.seed=1"]))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"of an interrupted run")
    result = run("train", config_file, "--out", tmp_path, "--set", "train.seed=1")
    assert result.exit_code == 0
    assert f"--resume would go on from {path}" in result.output.replace("\n", "")


def test_train_keeps_the_checkpoint_of_another_run(tmp_path, config_file):
    mine, other = load_config(config_file), load_config(config_file, ["train.batch_size=16"])
    path = checkpoint_path(tmp_path, other)
    assert path != checkpoint_path(tmp_path, mine)  # same label, same seed
    checkpoints.save(path, other, {"step": 1})
    result = run("train", config_file, "--out", tmp_path)
    assert result.exit_code == 0
    assert checkpoints.load(path, other)["step"] == 1


def test_train_an_entry(tmp_path, config_file):
    result = run("train", config_file, "--out", tmp_path, "--entry", "AdamW v1.5")
    assert result.exit_code == 0, result.output
    assert read_records(records_path(tmp_path))[0]["label"] == "AdamW v1.5"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "train.epoch=2"], "did you mean 'train.epochs'"),
        (["--set", "seeds=[5, 6]"], "--set seeds must name one seed for train, got [5, 6]"),
        (["--set", "train.batch_size=100000"], "batch_size must be at most"),
        (["--set", "data.name=digitz"], "digits"),
        (["--set", "model.name=small_cn"], "small_cnn"),
        (["--set", "optimizer.name=SDG"], "SGD"),
        (["--set", "optimizer.lr=high"], "lr must be a real number, got 'high'"),
        (
            ["--set", "optimizer.name=RMSprop", "--set", "optimizer.precond_lr=low"],
            "must be a real number",
        ),
        (["--set", "model.options.width=-2"], "cannot be built with {'width': -2}"),
        (["--set", "train.device=tpu9"], "train.device"),
        (["--set", "train.context=3"], "context"),
    ],
)
def test_bad_settings_end_with_code_2_and_a_sentence(tmp_path, config_file, arguments, said):
    result = run("train", config_file, "--out", tmp_path, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not records_path(tmp_path).exists()


@pytest.mark.parametrize("command", ["train", "compare", "demo"])
def test_an_output_folder_that_cannot_be_is_refused_before_training(tmp_path, config_file, command):
    arguments = [] if command == "demo" else [config_file]
    result = run(command, *arguments, "--out", config_file)
    assert result.exit_code == 2, result.output
    assert "--out must be a folder that can be written" in result.output
    assert "loss" not in result.output
    assert config_file.is_file()


def test_a_config_that_may_not_be_read_is_a_sentence(monkeypatch, config_file):
    def refuse(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(config_file), "read_text", refuse)
    result = run("train", config_file)
    assert result.exit_code == 2
    assert f"Permission denied: '{config_file}'" in result.output


def test_runs_that_cannot_be_are_refused_before_the_first(tmp_path, config_file):
    for setting, said in (
        ("train.batch_size=100000", "batch_size must be at most the number of examples"),
        ("schedule.warmup_epochs=9", "schedule.warmup_epochs must be shorter than the run"),
    ):
        for command in ("train", "compare"):
            result = run(command, config_file, "--out", tmp_path, "--set", setting)
            assert result.exit_code == 2, result.output
            assert said in result.output.replace("\n", " ")
    assert not records_path(tmp_path).exists()


def test_a_new_config_may_be_in_a_new_folder(tmp_path):
    path = tmp_path / "new" / "experiment.toml"
    assert run("new", path).exit_code == 0
    found = path.read_text()
    assert run("new", path).exit_code == 2  # and keeps what is there
    assert path.read_text() == found
    result = run("train", path, "--set", "compare.other.lr=3")
    assert result.exit_code == 2
    assert "is unknown" in result.output


def test_a_new_label_keeps_its_runs(tmp_path, config_file):
    assert run("compare", config_file, "--out", tmp_path).exit_code == 0
    before = read_records(records_path(tmp_path))
    old = "AdamW v1.5"
    config_file.write_text(config_file.read_text().replace(old, "under a new name"))
    result = run("compare", config_file, "--out", tmp_path)
    assert "4 of 4 runs are in" in result.output
    after = read_records(records_path(tmp_path))
    renamed = [{**r, "label": "under a new name"} for r in before if r["label"] == old]
    assert after == before + renamed
    assert read_records(records_path(tmp_path)) == after
    ((experiment,), repeated) = arrange(read(records_path(tmp_path))[0])
    assert {g.label for g in experiment.groups} == {r["label"] for r in after} - {old}
    assert len(repeated) == len(renamed)


def test_compare_runs_everything_once(tmp_path, config_file):
    result = run("compare", config_file, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert len(read_records(records_path(tmp_path))) == 4
    rows = [line for line in result.output.splitlines() if "2/2" in line]
    errors = [float(row.split("│")[5].strip().removesuffix("%")) for row in rows]
    assert len(errors) == 2
    assert errors == sorted(errors)

    again = run("compare", config_file, "--out", tmp_path)
    assert again.exit_code == 0
    assert "4 of 4 runs are in" in again.output
    assert "· step" not in again.output
    assert len(read_records(records_path(tmp_path))) == 4

    # One more seed of one entry: only that is run. Another setting is another run.
    more = ("--set", "compare.SGD.seeds=[0, 1, 2]", "--only", "SGD")
    assert run("compare", config_file, "--out", tmp_path, *more).exit_code == 0
    assert [r["seed"] for r in read_records(records_path(tmp_path))[4:]] == [2]
    changed = ("--set", "train.batch_size=40", "--only", "SGD", "--set", "seeds=[0]")
    assert run("compare", config_file, "--out", tmp_path, *changed).exit_code == 0
    assert len(read_records(records_path(tmp_path))) == 6


def test_failing_runs_are_recorded_and_the_rest_go_on(tmp_path, config_file):
    config_file.write_text(
        config_file.read_text()
        + "[[compare]]\nlabel = 'diverges [1e30]'\noptimizer = { lr = 1e30 }\nseeds = [0]\n"
        + "[[compare]]\nlabel = 'broken'\noptimizer = { lr = -1.0 }\nseeds = [0]\n"
    )
    arguments = ("compare", config_file, "--out", tmp_path, "--set", "seeds=[0]")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    records = {r["label"]: r for r in read_records(records_path(tmp_path))}
    assert [r["completed"] for r in records.values()] == [True, True, False, False]
    assert records["diverges [1e30]"]["failure"]["kind"] == "diverged"
    assert "not finite" in records["diverges [1e30]"]["failure"]["message"]
    assert records["broken"]["failure"]["kind"] == "error"
    assert "1 failed" in result.output
    assert "│ diverges [1e30] " in result.output
    # A divergence is an outcome, not repeated; what could not be carried out is tried again.
    run(*arguments)
    labels = [r["label"] for r in read_records(records_path(tmp_path))]
    assert (labels.count("diverges [1e30]"), labels.count("broken")) == (1, 2)


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("compare.AdamW v1.5.optimizer.lrr=1", "did you mean 'lr'?"),
        ("compare.AdamW v1.5.optimizer.name=AdanW", "did you mean 'AdamW'?"),
        ("compare.AdamW v1.5.model.options.widht=8", "did you mean 'width'?"),
        ("compare.AdamW v1.5.data.name=ptb", "Name a folder with ptb.train.txt"),
    ],
)
def test_what_is_wrong_in_one_entry_is_said_before_any_is_run(
    tmp_path, config_file, assignment, said
):
    result = run("compare", config_file, "--out", tmp_path, "--set", assignment)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "step" not in result.output
    assert not records_path(tmp_path).exists()


def test_a_diverged_run_has_exit_code_1(tmp_path, config_file):
    for _ in range(2):  # trained, then found on record
        result = run("train", config_file, "--out", tmp_path, "--set", "optimizer.lr=1e30")
        assert result.exit_code == 1
        assert "not finite" in result.output
        (record,) = read_records(records_path(tmp_path))
        assert record["completed"] is False


def test_compare_goes_on_from_a_checkpoint_and_keeps_others(tmp_path, config_file, monkeypatch):
    runs = load_comparison(config_file, ["seeds=[0]"])
    path = checkpoint_path(tmp_path, runs[0])
    original = session.Session.step

    def interrupting(self):
        original(self)
        if self.done == 2:
            stop.received = 2

    with compare.StopSignals() as stop, monkeypatch.context() as patch:
        patch.setattr(session.Session, "step", interrupting)
        with pytest.raises(compare.Interrupted):
            compare.compare(runs, out=tmp_path, console=Console(), stop=stop)
    assert path.exists()
    # Other settings under the same label have checkpoints of their own.
    other = run("compare", config_file, "--out", tmp_path, "--set", "train.batch_size=16")
    assert other.exit_code == 0
    assert path.exists()
    result = run("compare", config_file, "--out", tmp_path, "--set", "seeds=[0]")
    assert result.exit_code == 0, result.output
    assert "goes on from step 2" in result.output
    assert not path.exists()


def test_labels_are_whole_in_a_narrow_table(config_file):
    label = "IFShampoo with a long name"
    runs = load_comparison(config_file)
    shown = io.StringIO()
    rows = compare.table([replace(runs[0], label=label)], {})
    Console(width=60, file=shown).print(rows)
    column = [line.split("│")[1].strip() for line in shown.getvalue().splitlines() if "│" in line]
    assert "".join(column).replace(" ", "") == label.replace(" ", "")


def test_the_live_table_on_a_terminal(tmp_path, config_file):
    runs = load_comparison(config_file, ["seeds=[0]"])
    shown = io.StringIO()
    console = Console(force_terminal=True, width=200, file=shown)
    results = compare.compare(runs, out=tmp_path, console=console)
    assert "0/1" in shown.getvalue()  # while it was running
    assert "1/1" in shown.getvalue()
    assert all(record["completed"] for record in results.values())


def test_tensorboard_logs(tmp_path, config_file):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = ("--set", "output.tensorboard=true", "--set", "label=../SGD")
    result = run("train", config_file, "--out", tmp_path, *settings)
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "tensorboard").iterdir()
    log = events.EventAccumulator(str(folder)).Reload()
    assert {"train_loss", "test_error", "lr"} <= set(log.Tags()["scalars"])
    (record,) = read_records(records_path(tmp_path))
    (scalar,) = log.Scalars("test_loss")
    assert scalar.step == 5
    assert scalar.value == pytest.approx(record["final"]["test_loss"])
