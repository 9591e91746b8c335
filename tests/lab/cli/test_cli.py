"""The command line, end to end and small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rootfree_lab.cli import terminal
from rootfree_lab.cli.app import app
from rootfree_lab.comparing import demo
from rootfree_lab.report import figures


@pytest.fixture(autouse=True)
def wide_console(monkeypatch) -> None:
    """No cell of a table is cut, whatever the numbers in it."""
    monkeypatch.setattr(terminal, "console", Console(width=200))


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def drawings_only(monkeypatch) -> None:
    """The other formats of figures have their tests with the report."""
    monkeypatch.setattr(figures, "FORMATS", ("svg",))


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("drawings_only")
def test_demo(tmp_path):
    settings = ["--set", "train.epochs=2", "--set", "seeds=[0]", "--out", str(tmp_path)]
    result = run("demo", *settings)
    assert result.exit_code == 0, result.output
    records = records_of(tmp_path)
    assert {r["model"] for r in records} == {"small_cnn", "small_vit"}
    assert len(records) == 12  # six optimizers on each
    assert all(r["completed"] for r in records)
    page = (tmp_path / "report" / "report.html").read_text()
    assert "small_vit on digits" in page
    best = min(r["final"]["test_error"] for r in records if r["model"] == "small_cnn")
    assert best < 0.2  # two epochs teach a convolutional network the digits
    assert f", {best:.2%} over 1 seed" in result.output


@pytest.mark.slow
@pytest.mark.usefixtures("drawings_only")
def test_a_second_demo_takes_nothing_from_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "CONFIGS", ("small_cnn.toml",))
    settings = ["--set", "train.epochs=2", "--set", "seeds=[0]", "--set", "data.limit=128"]
    assert run("demo", *settings, "--out", str(tmp_path)).exit_code == 0
    first = records_of(tmp_path)
    wrong = [{**record, "final": {**record["final"], "test_error": -1.0}} for record in first]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in wrong))
    assert run("demo", *settings, "--out", str(tmp_path)).exit_code == 0
    again = records_of(tmp_path)
    assert [r["label"] for r in again] == [r["label"] for r in first]
    assert [r["final"] for r in again] == [r["final"] for r in first]


def test_a_demo_in_which_every_run_fails_says_why(tmp_path):
    settings = ["--set", "optimizer.lr=1e30", "--set", "train.epochs=2", "--set", "seeds=[0]"]
    result = run("demo", *settings, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "no run came to its end: the training loss is not finite" in result.output


@pytest.mark.parametrize(
    "arguments",
    [("demo", "--set", "train.epochs=0"), ("bench", "--turns", "-1"), ("no-such-command",)],
)
def test_bad_arguments_are_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the demo has made its folder by then
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_how_to_get_it(missing):
    """A module set to None in sys.modules is one that cannot be imported."""
    program = (
        f"import sys; sys.modules[{missing!r}] = None; sys.modules['{missing}.console'] = None\n"
        "from rootfree_lab.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install 'rootfree[lab]'")
    assert missing in result.stderr
    assert "Traceback" not in result.stderr
