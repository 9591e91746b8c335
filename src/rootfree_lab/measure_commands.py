"""Subcommands that measure: the paper's claims, the cost of steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rootfree_lab.loading_torch import loading_torch

_tried = partial(typer.Option, rich_help_panel="With --first-try")


def _claims() -> list[str]:
    from rootfree_lab.verify.table import CLAIMS

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
) -> None:
    """Check the paper's claims numerically on the library, one line a claim.

    \b
    Examples:
      rootfree verify
      rootfree verify --only woodbury --only truncation --seed 3
    """
    with loading_torch():
        from rootfree_lab.verify import report
    from rootfree_lab.commands import console

    try:
        claims = report.chosen(only or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    if json is not None and not json.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(json.parent)!r}", param_hint="--json")
    results = []
    for claim, measured in report.measure(claims, seed=seed):
        results.append((claim, measured))
        if not console.is_terminal:
            typer.echo(report.line(claim, measured))
    if console.is_terminal:
        console.print(report.as_table(results))
    if json is not None:
        json.write_text(report.as_json(results, seed=seed), encoding="utf-8")
    if not all(measured.passed for _, measured in results):
        raise typer.Exit(1)


def bench(
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Parameters to step on: vit_b, gpt1b, resnet34, vit_b_third, tiny; default: "
            "vit_b, on a CPU vit_b_third."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Step on the parameters of a timm model or a laboratory model."),
    ] = None,
    iteration: Annotated[
        str | None, typer.Option(help="Time whole training iterations of a model instead.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size of --iteration.")] = 128,
    dtype: Annotated[
        str, typer.Option(help="dtype of parameters and gradients: fp32 or bf16.")
    ] = "fp32",
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="Optimizer to time, or a pattern such as 'IFShampoo*'; repeatable."),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Optimizer or pattern to leave out; repeatable.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Optimizer that ratios compare with; default: the first.")
    ] = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Also time our steps replayed from a CUDA graph.")
    ] = False,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Turns of each; default: 20 on a GPU, 5 on a CPU.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            help="Stop timing an optimizer after this many seconds, but not before two turns."
        ),
    ] = 20.0,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; default: cuda if available.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="File to write all figures to; with --first-try one line a run, and a run that is "
            "in it is not repeated.",
        ),
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File for a bar chart: .png, .svg, .pdf.")
    ] = None,
    first_try: Annotated[
        bool,
        _tried(
            "--first-try",
            help="Train a dozen small real tasks with every optimizer at its defaults instead.",
        ),
    ] = False,
    tasks: Annotated[str, _tried(help="Tasks, with commas between; default: all.")] = "",
    optimizers: Annotated[str, _tried(help="Optimizers, with commas between; default: all.")] = "",
    assignments: Annotated[
        list[str] | None,
        _tried(
            "--set",
            help="Override a default: IFShampoo.lr=3e-3; values with commas between are all tried; "
            "may be given repeatedly.",
        ),
    ] = None,
    seeds: Annotated[int, _tried(min=1, help="Runs of each, from seed 0 on.")] = 3,
    scale: Annotated[
        str, _tried(help="small (seconds a run on a CPU) or full (a minute on a GPU).")
    ] = "small",
    steps: Annotated[int | None, _tried(min=1, help="Instead of the task's own.")] = None,
    constant: Annotated[
        bool, _tried("--constant", help="1,500 steps at a constant learning rate: late spikes.")
    ] = False,
    data: Annotated[
        Path | None, _tried(help="Folder with cifar10.npz, sotu.txt, cora.npz.")
    ] = None,
    jobs: Annotated[int, _tried(min=1, help="Runs side by side, as processes.")] = 1,
    tuned: Annotated[
        bool,
        _tried(
            "--tuned", help="Show the best setting of each optimizer in --json, and train nothing."
        ),
    ] = False,
    table_only: Annotated[
        bool, _tried("--table-only", help="Show what --json has, and train nothing.")
    ] = False,
    page: Annotated[
        Path | None, _tried(help="Put table and verdict between the marks of this page.")
    ] = None,
    pack: Annotated[
        Path | None, _tried(help="Only write the folder for --data, from the cache (and --data).")
    ] = None,
) -> None:
    """Time the steps of optimizers side by side: time, memory, rates, floors.

    With --first-try it trains a dozen small real tasks with every optimizer at its defaults.

    \b
    Examples:
      rootfree bench
      rootfree bench --model resnet34 --optimizer 'IFShampoo*' --turns 3
      rootfree bench --iteration vit_tiny --batch 64 --json steps.json
      rootfree bench --first-try --tasks cnn_digits --seeds 1
    """
    with loading_torch():
        from rootfree_lab.bench import command
        from rootfree_lab.bench.first_try import command as first_try_command
    from rootfree_lab.commands import console
    from rootfree_lab.exit_codes import with_exit_codes

    given = command.Arguments(
        shapes=shapes, model=model, iteration=iteration, batch=batch, dtype=dtype,
        optimizer=optimizer or [], without=without or [], reference=reference, graph=graph,
        turns=turns, seconds=seconds, device=device, json=json, chart=chart,
    )  # fmt: skip
    tried = first_try_command.Arguments(
        tasks=_listed(tasks), optimizers=_listed(optimizers), assignments=assignments or [],
        seeds=seeds, scale=scale, steps=steps, constant=constant, device=device, data=data,
        json=json, jobs=jobs, table_only=table_only, tuned=tuned, page=page, pack=pack,
    )  # fmt: skip

    def work() -> int:
        command.check_mode(given, tried, first_try=first_try)
        if first_try:
            return first_try_command.run(console, tried)
        return command.run(console, given)

    raise typer.Exit(with_exit_codes(work))


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


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
    from rootfree_lab.exit_codes import with_exit_codes

    raise typer.Exit(with_exit_codes(lambda: command.tables(files, page, charts)))
