"""The subcommands of `rootfree`: arguments in, one function call, a table out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rootfree_lab import experiment_commands
from rootfree_lab.experiment_commands import Assignments, ConfigFile

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
data_app = typer.Typer(no_args_is_help=True, help="List the data sets, or get one.")
app.add_typer(data_app, name="data")
console = Console()

Out = Annotated[Path, typer.Option(help="Folder for records, checkpoints and logs.")]

Rollback = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Go back to the last good state so many times at most when the loss diverges, with "
        "half the learning rate; the same as --set train.rollback=N.",
    ),
]

Cache = Annotated[Path | None, typer.Option(help="Cache folder instead of ROOTFREE_CACHE.")]


@app.callback()
def _root() -> None:
    """Optimizers without the square root: train, compare, measure."""


@app.command()
def demo(
    assignments: Assignments = None,
    out: Annotated[Path, typer.Option(help="Folder for records and the report.")] = Path(
        "out/demo"
    ),
) -> None:
    """Train a small CNN and a small transformer on handwritten digits with five optimizers."""
    from rootfree_lab.demo import run_demo
    from rootfree_lab.exit_codes import with_exit_codes

    def work() -> int:
        run_demo(console, out=out, assignments=assignments or [])
        return 0

    raise typer.Exit(with_exit_codes(work))


@app.command()
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
        typer.Option(
            "--first-try",
            help="Train a dozen small real tasks with every optimizer at its defaults instead; the "
            "options below belong to it.",
        ),
    ] = False,
    tasks: Annotated[str, typer.Option(help="Tasks, with commas between; default: all.")] = "",
    optimizers: Annotated[
        str, typer.Option(help="Optimizers, with commas between; default: all.")
    ] = "",
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a default: IFShampoo.lr=3e-3; values with commas between are all tried; "
            "may be given repeatedly.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, from seed 0 on.")] = 3,
    scale: Annotated[
        str, typer.Option(help="small (seconds a run on a CPU) or full (a minute on a GPU).")
    ] = "small",
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the task's own.")] = None,
    constant: Annotated[
        bool,
        typer.Option("--constant", help="1,500 steps at a constant learning rate: late spikes."),
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder with cifar10.npz, sotu.txt, cora.npz.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side, as processes.")] = 1,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Show what --json has, and train nothing.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Put table and verdict between the marks of this page.")
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(help="Only write the folder for --data, from the cache (and --data)."),
    ] = None,
) -> None:
    """Time the steps of optimizers side by side, or train small tasks with each (--first-try)."""
    from rootfree_lab.bench import command
    from rootfree_lab.bench.first_try import command as first_try_command
    from rootfree_lab.exit_codes import with_exit_codes

    given = command.Arguments(
        shapes=shapes, model=model, iteration=iteration, batch=batch, dtype=dtype,
        optimizer=optimizer or [], without=without or [], reference=reference, graph=graph,
        turns=turns, seconds=seconds, device=device, json=json, chart=chart,
    )  # fmt: skip
    tried = first_try_command.Arguments(
        tasks=_listed(tasks), optimizers=_listed(optimizers), assignments=assignments or [],
        seeds=seeds, scale=scale, steps=steps, constant=constant, device=device, data=data,
        json=json, jobs=jobs, table_only=table_only, page=page, pack=pack,
    )  # fmt: skip

    def work() -> int:
        command.check_mode(given, tried, first_try=first_try)
        if first_try:
            return first_try_command.run(console, tried)
        return command.run(console, given)

    raise typer.Exit(with_exit_codes(work))


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


@app.command("bench-table")
def bench_table(
    files: Annotated[list[Path], typer.Argument(help="JSON files written by bench --json.")],
    page: Annotated[
        Path | None, typer.Option(help="Put the tables between the marks of this page.")
    ] = None,
    charts: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for a bar chart of each file.")
    ] = None,
) -> None:
    """Show figures of the benchmark as Markdown tables."""
    from rootfree_lab.bench import command
    from rootfree_lab.exit_codes import with_exit_codes

    raise typer.Exit(with_exit_codes(lambda: command.tables(files, page, charts)))


@app.command()
def verify(
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a claim to check; may be given repeatedly.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random draw.")] = 0,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write the figures to.")
    ] = None,
) -> None:
    """Check the paper's claims numerically on the library, one line a claim."""
    from rootfree_lab.verify import report

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


@app.command()
def train(
    config: ConfigFile,
    assignments: Assignments = None,
    out: Out = Path("out"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
    entry: Annotated[
        str | None, typer.Option(help="Label of an entry under compare to train instead.")
    ] = None,
    rollback: Rollback = None,
) -> None:
    """Train the model that a config describes; Ctrl-C leaves a checkpoint for --resume."""
    from rootfree_lab.training_commands import train_command

    given = [*(assignments or []), *_rollback(rollback)]
    code = train_command(console, config, assignments=given, out=out, resume=resume, entry=entry)
    raise typer.Exit(code)


@app.command()
def compare(
    config: ConfigFile,
    assignments: Assignments = None,
    out: Out = Path("out"),
    only: Annotated[
        list[str] | None, typer.Option(help="Label of an entry to run; may be given repeatedly.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side, as processes.")] = 1,
    rollback: Rollback = None,
) -> None:
    """Run every entry that a config compares, with its seeds; what is on record is not repeated."""
    from rootfree_lab.training_commands import compare_command

    given = [*(assignments or []), *_rollback(rollback)]
    code = compare_command(console, config, assignments=given, out=out, only=only or [], jobs=jobs)
    raise typer.Exit(code)


def _rollback(times: int | None) -> list[str]:
    return [] if times is None else [f"train.rollback={times}"]


@app.command()
def report(
    records: Annotated[Path, typer.Argument(help="A records.jsonl, or a folder with such files.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; default: report/ beside the records.")
    ] = None,
) -> None:
    """Make a page, figures and a LaTeX table of the records of runs."""
    from rootfree_lab.report import ReportError, write_report

    try:
        written = write_report(records, out)
    except (ReportError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    for problem in written.problems:
        typer.echo(f"left out: {problem}", err=True)
    typer.echo(f"{written.runs} runs, {len(written.figures)} figures: {written.page}")


@data_app.command("list")
def data_list(cache: Cache = None) -> None:
    """Show the data sets: kind, size, whether they are here, how to get them."""
    from rootfree_lab.data.table import sources_table

    console.print(sources_table(cache))


@data_app.command("fetch")
def data_fetch(name: str, cache: Cache = None) -> None:
    """Get a data set with its package manager, check it, and keep it in the cache."""
    from rootfree_lab.data import DataError, fetch

    try:
        with console.status(f"getting {name}"):
            folder = fetch(name, cache=cache)
    except DataError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{name} is in {folder}" if folder else f"{name} comes with an installed package")


for command in (
    experiment_commands.new,
    experiment_commands.search,
    experiment_commands.export,
    experiment_commands.evidence,
):
    app.command()(command)
