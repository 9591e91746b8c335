"""The shell commands of the README and the pages: none is misspelt, and the first ones are run.

A command is checked by the parser that it would meet. Most of them train for minutes or install
packages, and `rootfree demo` is run by lab/test_cli.py; those of the quickstart that take seconds
are run as they are printed, and the configs of two pages train.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from typer.main import get_command
from typer.testing import CliRunner

from rootfree_lab.commands import app
from test_docs import FENCED, PAGES, ROOT, blocks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROGRAMS = ("rootfree", "make", "pip", "python", "torchrun", "tensorboard")
INLINE = re.compile(rf"`((?:{'|'.join(PROGRAMS)}) [^`\n]+)`")
#: made by `rootfree evidence`, which prints commands as text
GENERATED = {"evidence.md"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def printed(page: Path) -> list[list[str]]:
    """The words of every command in a block, without comments and settings of variables."""
    lines = [line for _, text in blocks(page, "bash") for line in text.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] if "=" in words[0] else words for words in found if words]


def mentioned(page: Path) -> list[list[str]]:
    """The words of every command inside a sentence; it may lack arguments."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return [shlex.split(command.rstrip(" …")) for command in INLINE.findall(text)]


def command_of(words: list[str]):
    """The command of `rootfree` that words begin with, and the other words."""
    command, words = get_command(app), list(words)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name != "COMMAND":
            command = command.commands[name]
    return command, words


def check_rootfree(words: list[str], *, whole: bool) -> None:
    command, words = command_of(words)
    if whole and not hasattr(command, "commands"):
        try:
            command.make_context("rootfree", [*words])
        except Exception as error:  # of typer, whose classes depend on its version
            raise AssertionError(f"{words}: {error}") from error
        for word in words:
            if word.startswith("configs/") and "NAME" not in word:
                assert (ROOT / word).exists(), word
    else:
        known = {option for each in command.params for option in each.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known, words


def check_make(words: list[str], *, whole: bool) -> None:
    run = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for line in re.findall(r"^\S*bin/(rootfree .*)$", run.stdout, re.MULTILINE):
        check(shlex.split(line), whole=True)


def check_pip(words: list[str], *, whole: bool) -> None:
    assert words[0] in ("install", "download")
    for extra in re.findall(r"\.\[(.*?)\]", " ".join(words)):
        assert extra in EXTRAS, extra
    if "-r" in words:
        assert (ROOT / words[words.index("-r") + 1]).exists()


def check_python(words: list[str], *, whole: bool) -> None:
    if words[0] == "-m":
        assert words[1] == "rootfree_lab"
        check_rootfree(words[2:], whole=whole)
    else:
        assert (ROOT / words[0]).exists(), words[0]


def check_torchrun(words: list[str], *, whole: bool) -> None:
    if "..." in words or not any(not word.startswith("--") for word in words):
        words = [word for word in words if word not in ("...", "--resume")] + ["train.py"]
    given = get_args_parser().parse_args(words)
    if given.module:
        assert given.training_script == "rootfree_lab"
        check_rootfree(given.training_script_args, whole=whole)
    else:  # what the page tells to save the script as
        assert given.training_script == "train.py"


def check_tensorboard(words: list[str], *, whole: bool) -> None:
    assert words[0] == "--logdir"


def check(words: list[str], *, whole: bool) -> None:
    assert words[0] in PROGRAMS, words
    globals()[f"check_{words[0]}"](words[1:], whole=whole)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_commands_are_known(page):
    for words in printed(page):
        check(words, whole=True)
    for words in mentioned(page):
        check(words, whole=False)
    if page.name not in GENERATED:  # nor are there any that nobody looks at
        for _, text in [*blocks(page, "text"), *blocks(page, "console"), *blocks(page, "")]:
            assert not re.search(rf"^({'|'.join(PROGRAMS)}) ", text, re.MULTILINE), text


@pytest.mark.parametrize(
    "misspelt",
    [
        "rootfree trian experiment.toml",
        "rootfree train experiment.toml --setting a=1",
        "rootfree --versoin",
        "rootfree search configs/small/no_such.toml",
        "make dmeo",
        "pip install '.[labs]'",
        "torchrun --nproc-por-node=4 train.py",
        "torchrun -m rootfree_lab trian CONFIG",
        "python tests/no_such.py",
        "rotfree demo",
    ],
)
def test_what_is_misspelt_is_found(misspelt):
    with pytest.raises((AssertionError, KeyError, SystemExit)):
        check(shlex.split(misspelt), whole=True)


SHORTER = ["--set", "train.epochs=2", "--set", "seeds=[0]", "--set", "data.limit=256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "command", "options"),
    [("own_work.md", "train", []), ("laboratory.md", "compare", SHORTER)],
)
def test_the_config_of_a_page_trains(name, command, options, tmp_path, monkeypatch):
    """With the page's Python beside it."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / name
    ((_, config),) = blocks(page, "toml")
    for _, source in blocks(page, "python"):
        Path("speech.py").write_text(source, encoding="utf-8")
    Path("config.toml").write_text(config, encoding="utf-8")
    result = CliRunner().invoke(app, [command, "config.toml", *options])
    assert result.exit_code == 0, result.output
    records = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert len(records) == config.count("optimizer]")
    assert all('"completed": true' in record for record in records)


@pytest.mark.slow
def test_the_commands_of_the_quickstart_work_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, (_, text) = blocks(ROOT / "docs" / "quickstart.md", "bash")  # the first one installs
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    assert [words[:2] for words in commands] == [
        ["rootfree", "demo"], ["rootfree", "new"], ["rootfree", "train"], ["rootfree", "--help"]
    ]  # fmt: skip
    for _, *arguments in commands[1:]:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 1
