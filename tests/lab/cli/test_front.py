"""What a user sees before anything is trained: help, version, completion, the wait for torch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

import rootfree
from rootfree_lab.cli import terminal
from rootfree_lab.cli.app import app
from rootfree_lab.comparing import demo
from rootfree_lab.config import needed
from rootfree_lab.training.session import Session
from rootfree_lab.training.watching import progress

CONFIGS = Path(__file__).parents[3] / "configs"
COMMANDS = {
    **{name: [name] for name in get_command(app).commands if name != "data"},
    "data list": ["data", "list"],
    "data fetch": ["data", "fetch"],
}
CALL = "import sys; sys.argv[0] = 'rootfree'; from rootfree_lab.cli import main; main()"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, whose output is a pipe."""
    return subprocess.run(
        [sys.executable, "-c", CALL, *arguments],
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_help_are_commands(name):
    """Every line is parsed by the command that it names; nothing of it is run."""
    said = run(*COMMANDS[name], "--help").output
    lines = re.findall(r"^ +(rootfree .*)$", said.replace("│", " "), flags=re.MULTILINE)
    assert lines or name == "data list"
    for line in lines:
        command = get_command(app)
        words = shlex.split(line)[1:]
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("rootfree", words)  # raises where an option is unknown


def test_help_is_shown_without_loading_torch():
    program = f"import sys\ntry:\n    {CALL}\nfinally:\n    print('torch' in sys.modules)"
    for arguments in (["--help"], ["train", "--help"], ["train"]):
        words = [sys.executable, "-c", program, *arguments]
        result = subprocess.run(words, capture_output=True, text=True)
        assert "Usage: rootfree" in result.stdout + result.stderr
        assert result.stdout.splitlines()[-1] == "False"


def test_the_version_and_the_line_while_torch_loads():
    result = process("--version")
    assert result.returncode == 0
    assert result.stdout == f"rootfree {rootfree.__version__}, torch {torch.__version__}\n"
    assert result.stderr == "loading torch\n"
    assert process("--version", RANK="1").stderr == ""  # of several ranks the first one speaks


def test_the_shell_completes_commands_options_and_what_a_config_has():
    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        return process(_ROOTFREE_COMPLETE="complete_bash", **words).stdout.splitlines()

    config = CONFIGS / "small" / "digits_cnn.toml"
    assert completed("rootfree comp") == ["compare"]
    assert completed("rootfree train --res") == ["--resume"]
    assert completed(f"rootfree train {config} --entry I") == ["IFShampoo"]
    labels = completed(f"rootfree compare {config} --only R")
    assert labels == ["RFRMSprop", "RFRMSprop, fast start"]
    assert completed("rootfree data fetch co") == ["cora"]
    assert completed("rootfree train nothing.toml --entry I") == [""]


def test_the_demo_asks_for_the_packages_of_its_report_first(monkeypatch, tmp_path):
    monkeypatch.setattr(needed, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "compare", None)
    result = run("demo", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "the report needs matplotlib: pip install 'rootfree[lab]'" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("seconds", "lines"), [(1, 2), (25, 3), (60, 7)])
def test_a_log_gets_a_line_a_minute(tmp_path, monkeypatch, seconds, lines):
    """Between the first and the last line one a minute, however many epochs there are."""
    monkeypatch.setattr(terminal, "console", Console(width=200))
    steps = []  # each takes so many seconds
    clock = SimpleNamespace(
        monotonic=lambda: seconds * len(steps), perf_counter=lambda: seconds * len(steps)
    )
    monkeypatch.setattr(progress, "time", clock)
    step = Session.step
    monkeypatch.setattr(Session, "step", lambda self: (steps.append(1), step(self)))
    arguments = ["--entry", "SGD", "--set", "data.limit=160", "--set", "train.epochs=3"]
    config = str(CONFIGS / "small" / "digits_cnn.toml")
    result = run("train", config, *arguments, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    said = [line for line in result.output.splitlines() if " steps on " in line or "/s · " in line]
    assert len(said) == lines, result.output
    assert said[0] == "SGD seed 0 · starts · 6 steps on cpu"
    assert "step 6/6" in said[-1]
    assert "accuracy" in said[-1]
