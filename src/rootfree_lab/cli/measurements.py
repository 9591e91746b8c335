"""Subcommands that measure: the paper's claims, the cost of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rootfree_lab.bench.options import asked_for, takes_options
from rootfree_lab.cli import terminal
from rootfree_lab.cli.terminal import loading_torch


def _claims() -> list[str]:
    from rootfree_lab.verify.report import CLAIMS

    return list(CLAIMS)


def verify(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a claim to check; may be given repeatedly.", autocompletion=_claims
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random draw.")] = 0,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write the figures to.")
    ] = None,
) -> int:
    """Check the paper's claims numerically on the library, one line a claim.

    \b
    Examples:
      rootfree verify
      rootfree verify --only woodbury --only truncation --seed 3
    """
    with loading_torch():
        from rootfree_lab.verify import report

    try:
        claims = report.chosen(only or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    if json is not None:
        if not json.parent.is_dir():
            raise typer.BadParameter(
                f"there is no folder {str(json.parent)!r}", param_hint="--json"
            )
        json.open("a").close()  # what cannot be written ends it now
    results = []
    for claim, measured in report.measure(claims, seed=seed):
        results.append((claim, measured))
        if not terminal.console.is_terminal:
            typer.echo(report.line(claim, measured))
    if terminal.console.is_terminal:
        terminal.console.print(report.as_table(results))
    if json is not None:
        json.write_text(report.as_json(results, seed=seed), encoding="utf-8")
    return 0 if all(measured.passed for _, measured in results) else 1


@takes_options
def bench(**given: Any) -> int:
    """Time the steps of optimizers side by side: time, memory, rates, floors.

    With --first-try it trains a dozen small real tasks with every optimizer at its defaults.

    \b
    Examples:
      rootfree bench
      rootfree bench --model resnet34 --optimizer 'IFShampoo*' --turns 3
      rootfree bench --iteration vit_tiny --batch 64 --json steps.json
      rootfree bench --first-try --tasks cnn_digits --seeds 1
      rootfree bench --distributed-model --link 100
    """
    mode = asked_for(given)
    with loading_torch():
        from rootfree_lab.bench import command

    return command.run(terminal.console, mode)


def bench_table(
    files: Annotated[list[Path], typer.Argument(help="JSON files written by bench --json.")],
    page: Annotated[
        Path | None, typer.Option(help="Put the tables between the marks of this page.")
    ] = None,
    charts: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for a bar chart of each file.")
    ] = None,
) -> None:
    """Show figures of the benchmark as Markdown tables.

    \b
    Examples:
      rootfree bench-table steps.json
      rootfree bench-table docs/performance/*.json --page docs/performance.md
    """
    with loading_torch():
        from rootfree_lab.bench import command

    command.tables(files, page, charts)
