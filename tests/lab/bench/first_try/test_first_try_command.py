"""`rootfree bench --first-try`, end to end on a CPU with a few steps."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rootfree_lab.bench.first_try import records, runs
from rootfree_lab.bench.first_try.command import FULL, HELD_OUT, MARKS, SENSITIVITY
from rootfree_lab.cli import terminal
from rootfree_lab.cli.app import app

TINY = ("--tasks", "mlp_digits,least_squares_diabetes", "--optimizers", "AdamW,IFShampoo")
FAST = ("--device", "cpu", "--steps", "60", "--seeds", "1")


@pytest.fixture(autouse=True)
def console_and_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(terminal, "console", Console(width=250))
    monkeypatch.setenv("ROOTFREE_CACHE", str(tmp_path / "cache"))


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "--first-try", *arguments])


def test_two_tasks_with_two_optimizers(tmp_path):
    file = tmp_path / "runs.jsonl"
    result = run(*TINY, *FAST, "--json", str(file))
    assert result.exit_code == 0, result.output
    found = {(r.task, r.label): r for r in records.read(file)}
    assert set(found) == {
        (task, label)
        for task in ("mlp_digits", "least_squares_diabetes")
        for label in ("AdamW", "IFShampoo")
    }
    for record in found.values():
        assert record.batch_size == 64
        assert record.steps == 60
        assert not record.diverged
        assert record.late_ratio >= 1
        if record.task == "mlp_digits":
            assert record.best_mean == record.final_loss < record.curve[0][1]
        assert record.curve[-1][0] == 60
    assert found["mlp_digits", "AdamW"].options["lr"] == 1e-3
    assert found["mlp_digits", "AdamW"].options["weight_decay"] == 0.01  # a default of torch
    assert found["mlp_digits", "IFShampoo"].options["companion_lr"] == 2e-3
    assert found["mlp_digits", "AdamW"].test_error is not None
    assert found["least_squares_diabetes", "AdamW"].test_error is None
    assert "(b) IFShampoo" in result.output


def test_a_run_in_the_file_is_not_repeated(tmp_path, monkeypatch):
    file = tmp_path / "runs.jsonl"
    arguments = ("--tasks", "mlp_digits", "--optimizers", "AdamW", *FAST, "--json", str(file))
    assert run(*arguments).exit_code == 0
    before = file.read_bytes()
    file.write_bytes(before + b'{"format": "rootfree fir')  # a line that was cut short

    def fail(_):
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "train", fail)
        result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "1 of 1 runs are in" in result.output
    # Another option, and another number of steps: other runs.
    assert run(*arguments, "--set", "AdamW.lr=3e-3").exit_code == 0
    assert run(*arguments, "--steps", "10").exit_code == 0
    assert [(r.label, r.steps) for r in records.read(file)] == [
        ("AdamW", 60), ("AdamW lr=0.003", 60), ("AdamW", 10),
    ]  # fmt: skip
    assert file.read_bytes().startswith(before)


@pytest.mark.slow
def test_runs_side_by_side_are_the_same(tmp_path):
    files = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for file, jobs in zip(files, "12", strict=True):
        assert run(*TINY, *FAST, "--json", str(file), "--jobs", jobs).exit_code == 0
    one, two = ({r.key: r.final_loss for r in records.read(file)} for file in files)
    assert one == pytest.approx(two)


def test_missing_data_is_said_and_skipped():
    result = run("--tasks", "gat_cora,gpt_sotu,mlp_digits", "--optimizers", "AdamW", *FAST)
    assert result.exit_code == 0, result.output
    assert "skipped gat_cora: cora: it is not in the cache" in result.output
    assert "Or give --data FOLDER with cora.npz." in result.output
    assert "skipped gpt_sotu" in result.output
    assert "rootfree data fetch sotu" in result.output
    assert "[1/1] mlp_digits, AdamW, seed 0: loss" in result.output


def test_the_page_is_filled_from_the_file(tmp_path):
    file, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    assert run(*TINY, *FAST, "--steps", "5", "--json", str(file)).exit_code == 0
    page.write_text(f"before\n\n{MARKS.begin}\n{MARKS.end}\n\nafter\n")
    arguments = ("--table-only", "--json", str(file), "--steps", "5", "--page", str(page))
    assert run(*arguments).exit_code == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| task | AdamW: loss | IFShampoo |" in text
    assert "(b) `IFShampoo`" in text
    assert run(*arguments).exit_code == 0
    assert page.read_text() == text
    page.write_text("no marks")
    result = run(*arguments)
    assert result.exit_code == 2
    assert "must have one block between" in result.output


def test_runs_at_full_size_have_a_table_of_their_own(tmp_path):
    small, file, page = tmp_path / "small.jsonl", tmp_path / "full.jsonl", tmp_path / "page.md"
    assert run(*TINY, *FAST, "--steps", "5", "--json", str(small)).exit_code == 0
    file.write_text(small.read_text().replace('"scale": "small"', '"scale": "full"'))
    page.write_text(f"{MARKS.begin}\n{MARKS.end}\n\n{FULL.begin}\n{FULL.end}\n")
    arguments = ("--table-only", "--json", str(file), "--steps", "5", "--page", str(page))
    assert run(*arguments, "--scale", "full").exit_code == 0
    first, second = page.read_text().split(FULL.begin)
    assert "| task |" not in first
    assert "| mlp_digits |" in second
    assert run(*arguments).exit_code == 2  # none of the small ones is in this file


def test_held_out_tasks_are_a_suite_and_a_table_of_their_own(tmp_path):
    file, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    page.write_text(f"{MARKS.begin}\n{MARKS.end}\n\n{HELD_OUT.begin}\n{HELD_OUT.end}\n")
    only = ("--optimizers", "AdamW,SGD", "--steps", "5", "--json", str(file), "--page", str(page))
    for more in (("--tasks", "mlp_digits"), ("--held-out",)):
        result = run(*more, *FAST, *only)
        assert result.exit_code == 0, result.output
    assert "skipped mlp_letter: letter: it is not in the cache" in result.output
    first, second = page.read_text().split(HELD_OUT.begin)
    assert "| mlp_digits |" in first
    assert "| mlp_batch512_digits |" not in first
    assert "| mlp_batch512_digits |" in second
    assert "| mlp_digits |" not in second
    result = run("--held-out", "--tasks", "mlp_digits")
    assert "--tasks: the task 'mlp_digits' is unknown" in result.output


def test_settings_are_changed_one_at_a_time(tmp_path):
    file, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    page.write_text(f"{SENSITIVITY.begin}\n{SENSITIVITY.end}\n")
    only = ("--tasks", "mlp_digits", "--optimizers", "AdamW,IFWhitening", "--json", str(file))
    result = run("--sensitivity", *only, *FAST, "--steps", "5", "--page", str(page))
    assert result.exit_code == 0, result.output
    assert len(records.read(file)) == 3 + 9
    assert "| changed | mlp_digits: AdamW | mlp_digits: IFWhitening |" in page.read_text()
    result = run("--sensitivity", "--table-only", *only, "--page", str(page))
    assert result.exit_code == 2
    assert "there are no runs of that kind" in result.output  # of the task's own number of steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "mlp"), "--tasks: the task 'mlp' is unknown"),
        (("--optimizers", "IFShampo"), "did you mean 'IFShampoo'?"),
        (("--scale", "large"), "--scale: 'large' is unknown"),
        (("--set", "lr=1"), "--set takes OPTIMIZER.OPTION=VALUE, got 'lr=1'"),
        (("--set", "Adam.lr=1"), "--set: the optimizer 'Adam' is unknown; did you mean 'AdamW'?"),
        (("--set", "SGD.momentun=1"), "the option of SGD, 'momentun' is unknown; did you mean"),
        (("--set", "SGD.companion_lr=1"), "the option of SGD, 'companion_lr' is unknown"),
        (("--set", "IFShampoo.batch_size=1"), "batch_size must not be given, got 1"),
        (("--set", "IFShampoo.momentum=2"), "IFShampoo: momentum must be in"),
        (("--set", "IFShampoo.factor_dtype=half16"), "must be the name of a torch dtype"),
        (("--set", "SGD.lr=1", "--optimizers", "AdamW"), "which --optimizers leaves out"),
        (("--table-only",), "--table-only needs --json"),
        (("--tuned", "--sensitivity"), "--sensitivity has no place beside --tuned"),
        (("--json", "/nowhere/a.jsonl"), "--json: there is no folder '/nowhere'"),
        (("--data", "/nowhere"), "--data: there is no folder '/nowhere'"),
        (("--page", "/nowhere.md"), "--page: there is no file '/nowhere.md'"),
        (("--shapes", "tiny"), "--shapes has no place beside --first-try"),
    ],
)
def test_bad_arguments(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_options_of_the_first_try_need_it():
    result = CliRunner().invoke(app, ["bench", "--tasks", "mlp_digits"])
    assert result.exit_code == 2
    assert "--tasks needs --first-try" in result.output


def test_a_file_of_something_else(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"format": "rootfree bench steps 1"}) + "\n")
    result = run("--table-only", "--json", str(file))
    assert result.exit_code == 2
    assert "line 1 is no record of bench --first-try" in result.output


def test_a_record_with_a_value_of_another_kind(tmp_path):
    file = tmp_path / "a.jsonl"
    records.append(
        file, records.Record("mlp_digits", "SGD", "SGD", {}, 0, "small", 2, False, "cpu")
    )
    file.write_text(file.read_text().replace('"seed": 0', '"seed": "zero"'))
    result = run("--table-only", "--json", str(file))
    assert result.exit_code == 2
    assert "line 1: Expected `int`, got `str` - at `$.seed`" in " ".join(result.output.split())
