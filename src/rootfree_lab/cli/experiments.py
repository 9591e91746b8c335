"""Subcommands that train: a demonstration, a run, a comparison, a search; and a new config."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from rootfree_lab.cli import terminal
from rootfree_lab.cli.exits import FAILED
from rootfree_lab.cli.options import (
    Assignments,
    ConfigFile,
    Jobs,
    Only,
    Out,
    Rollback,
    entry_labels,
    rolled_back,
)
from rootfree_lab.cli.terminal import loading_torch
from rootfree_lab.config.reading import ConfigError, check_names, parse_assignment


def demo(
    assignments: Assignments = None,
    out: Annotated[Path, typer.Option(help="Folder for records and the report.")] = Path(
        "out/demo"
    ),
) -> None:
    """Train a small CNN and a small transformer on handwritten digits, with six optimizers.

    Shows a table of each and writes a report.

    \b
    Examples:
      rootfree demo
      rootfree demo --set train.epochs=2 --set 'seeds=[0]'
    """
    with loading_torch():
        from rootfree_lab.comparing.demo import run_demo

    run_demo(terminal.console, out=out, assignments=assignments or [])


def new(
    path: Annotated[
        Path, typer.Argument(dir_okay=False, help="File to write; one that is there is kept.")
    ] = Path("experiment.toml"),
) -> None:
    """Write a commented config to start from.

    \b
    Example:
      rootfree new experiment.toml
    """
    text = (files("rootfree_lab.config") / "new.toml").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{str(path)!r} is there already: choose another name") from error
    typer.echo(f"wrote {path}; try: rootfree train {path}")


def train(
    config: ConfigFile,
    assignments: Assignments = None,
    out: Out = Path("out"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
    entry: Annotated[
        str | None,
        typer.Option(
            help="Label of the entry to train, where there are several.",
            autocompletion=entry_labels,
        ),
    ] = None,
    rollback: Rollback = None,
) -> int:
    """Train one run of a config: one optimizer, one seed.

    The seed is train.seed, or else the first of seeds.
    Ctrl-C leaves a checkpoint for --resume.
    A run that is on record is not trained again.

    \b
    Examples:
      rootfree train experiment.toml
      rootfree train configs/small/digits_cnn.toml --entry IFShampoo
      rootfree train experiment.toml --set optimizer.lr=3e-3 --set train.seed=1
      rootfree train experiment.toml --resume
    """
    with loading_torch():
        from rootfree_lab.training import run as training
    from rootfree_lab.config.files import load_config
    from rootfree_lab.files.checkpoints import checkpoint_path
    from rootfree_lab.processes.stopping import StopSignals
    from rootfree_lab.training.parallel import speaks
    from rootfree_lab.training.watching.progress import Bar, Lines, Watcher, plain_lines

    say = typer.echo if speaks() else _silent
    given = rolled_back(assignments, rollback)
    _check_one_seed(given)
    run = load_config(config, given, entry)
    records = training.records_path(out)
    recorded = training.known_record(out, run)
    if recorded is not None:
        training.sweep(out, run)
        say(f"this run is in {records} already; another --out trains it again")
        return _ended(say, recorded)
    checkpoint = checkpoint_path(out, run)
    if checkpoint.exists() and not resume:
        say(f"starts anew; --resume would go on from {checkpoint}", err=True)
    elif resume and not checkpoint.exists():
        say(f"there is no {checkpoint}: starts from the beginning", err=True)
    bar = Bar(terminal.console) if terminal.console.is_terminal else None
    watchers: list[Watcher] = [bar or Lines(plain_lines(terminal.console))]
    with StopSignals() as stop, bar.progress if bar else nullcontext():
        record = training.train(run, out=out, resume=resume, stop=stop, watchers=watchers)
    code = _ended(say, record)
    say(f"recorded in {records}")
    return code


def _check_one_seed(assignments: list[str]) -> None:
    for text in assignments:
        name, value = parse_assignment(text)
        if name.rpartition(".")[2] == "seeds" and isinstance(value, list) and len(value) > 1:
            raise ConfigError(
                f"--set {name} must name one seed for train, got {value}: rootfree compare trains "
                "several"
            )


def _ended(say: Callable[..., None], record: dict[str, Any]) -> int:
    """Say how a run ended."""
    from rootfree_lab.training.watching.progress import describe_point

    if not record["completed"]:
        say(_failure(record), err=True)
        return FAILED
    say(f"{record['label']} seed {record['seed']} · {describe_point(record['curve'][-1])}")
    return 0


def _failure(record: dict[str, Any]) -> str:
    return f"{record['label']} seed {record['seed']} failed: {record['failure']['message']}"


def _silent(message: str, **how: bool) -> None:
    """Another process says it."""


def compare(
    config: ConfigFile,
    assignments: Assignments = None,
    out: Out = Path("out"),
    only: Only = None,
    jobs: Jobs = 1,
    rollback: Rollback = None,
) -> int:
    """Train every entry of a config with all its seeds, and show the table.

    Runs that are on record are not trained again, so the same command continues after a stop.

    \b
    Examples:
      rootfree compare configs/small/digits_cnn.toml --out out/digits
      rootfree compare experiment.toml --only AdamW --only IFShampoo --jobs 2
      rootfree compare experiment.toml --set 'seeds=[0]' --set train.epochs=3
    """
    with loading_torch():
        from rootfree_lab.comparing import compare as comparison
    from rootfree_lab.config.files import load_comparison
    from rootfree_lab.processes.stopping import StopSignals
    from rootfree_lab.training.run import records_path

    console = terminal.console
    runs = _chosen(load_comparison(config, rolled_back(assignments, rollback)), only)
    with StopSignals() as stop:
        results = comparison.compare(runs, out=out, console=console, stop=stop, jobs=jobs)
    console.print(comparison.table(runs, results, by_result=True))
    typer.echo(f"records: {records_path(out)}")
    failed = [record for record in results.values() if not record["completed"]]
    for record in failed:
        typer.echo(_failure(record), err=True)
    # A comparison in which some diverge is a result; one without any result is not.
    return FAILED if len(failed) == len(results) else 0


def _chosen(found: Iterable[Any], only: list[str] | None) -> list[Any]:
    """Those of the labels that `--only` names, all of them where it names none."""
    labels = list(dict.fromkeys(each.label for each in found))
    check_names("--only: the entry", only or [], labels)
    return [each for each in found if not only or each.label in only]


def search(
    config: ConfigFile,
    assignments: Assignments = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results; default: out/search/ and the config's name."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Journal file, or an Optuna URL such as postgresql://HOST/DB, which many machines "
            "can share; default: journal.log in the folder."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the search in the storage; default: the config's.")
    ] = None,
    jobs: Jobs = 1,
    only: Only = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Carry out trials again that failed.")
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve Optuna's dashboard on this machine.")
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of --dashboard.")] = 8080,
) -> int:
    """Search for the settings of every optimizer of a config, with the same budget for each.

    Writes the best ones as a config. The same command continues after a stop.

    \b
    Examples:
      rootfree search configs/small/digits_cnn.toml --jobs 4
      rootfree compare out/search/digits_cnn/best.toml --out out/final
    """
    from rootfree_lab.config.needed import need

    need("rootfree search", "optuna", "rootfree[search]")
    if dashboard:
        need("--dashboard", "optuna_dashboard", "optuna-dashboard")
    with loading_torch():
        from rootfree_lab.search import settings
        from rootfree_lab.search.carrying_out import carry_out_search
    from rootfree_lab.config.files import read_tables

    entries = _chosen(settings.load_entries(config, assignments or []), only)
    settings.check(entries)
    best = carry_out_search(
        terminal.console, entries, read_tables(config, assignments or []),
        out=out or Path("out/search") / config.stem, storage=storage, name=name or config.stem,
        jobs=jobs, retry_failed=retry_failed, port=port if dashboard else None,
    )  # fmt: skip
    if best is None:
        typer.echo("no trial has completed", err=True)
        return FAILED
    typer.echo(f"best settings: {best}; final runs: rootfree compare {best}")
    return 0
