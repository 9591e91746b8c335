"""Arguments that several subcommands have, and what the shell completes them with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rootfree_lab.config.reading import ConfigError, read_toml


def entry_labels(context: typer.Context) -> list[str]:
    """The labels of the `[[compare]]` entries of the config on the command line."""
    # An option that still waits for its value leaves arguments where they were.
    given = [context.params.get("config"), *context.args]
    try:
        config = next(Path(each) for each in given if each is not None)
        return [entry["label"] for entry in read_toml(config).get("compare", [])]
    except (ConfigError, StopIteration, LookupError, TypeError, OSError):
        return []  # the command itself says what is wrong


ConfigFile = Annotated[Path, typer.Argument(help="TOML file, such as those under configs/.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Override a setting: optimizer.lr=3e-4; may be given repeatedly.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LABEL",
        help="Label of an entry to take; may be given repeatedly.",
        autocompletion=entry_labels,
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for records, checkpoints and logs.")]
Jobs = Annotated[int, typer.Option(min=1, metavar="N", help="Runs side by side, as processes.")]
Rollback = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="After divergence go back to the last good state, N times at most, with half the "
        "learning rate; the same as --set train.rollback=N.",
    ),
]
Records = Annotated[Path, typer.Argument(help="A records.jsonl, or a folder with such files.")]


def rolled_back(assignments: list[str] | None, times: int | None) -> list[str]:
    """What `--set` and `--rollback` say together."""
    return [*(assignments or []), *([] if times is None else [f"train.rollback={times}"])]
