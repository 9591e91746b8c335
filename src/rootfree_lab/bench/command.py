"""What `rootfree bench` and `rootfree bench-table` do with their arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from rootfree_lab.bench import chart, markdown
from rootfree_lab.bench.contenders import DEFAULT_ON_CPU, Contender, chosen, contenders
from rootfree_lab.bench.distributed_model import run as plan
from rootfree_lab.bench.first_try import command as first_try
from rootfree_lab.bench.iteration import DEFAULT as DEFAULT_OF_ITERATIONS
from rootfree_lab.bench.iteration import measure_iterations
from rootfree_lab.bench.model import build_model
from rootfree_lab.bench.options import Distributed, FirstTry, Mode, Timing
from rootfree_lab.bench.record import Record, read, write
from rootfree_lab.bench.shapes import shapes_of
from rootfree_lab.bench.steps import measure_steps
from rootfree_lab.bench.table import as_table, remarks
from rootfree_lab.config.needed import need
from rootfree_lab.config.reading import ConfigError, check_names
from rootfree_lab.training.devices import choose_device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TURNS = {"cuda": 20, "cpu": 5}


def run(console: Console, given: Mode) -> int:
    """Do what was asked for.  Raises ValueError for bad arguments."""
    if isinstance(given, FirstTry):
        return first_try.run(console, given)
    return plan(console, given) if isinstance(given, Distributed) else measure(console, given)


def measure(console: Console, given: Timing) -> int:
    """Measure, show, and write what was asked for."""
    _check_files(given)
    if given.device is not None:
        check_names("--device:", [given.device], _TURNS)
    device = choose_device(given.device or "auto", "--device")
    if not (given.seconds > 0 and math.isfinite(given.seconds)):
        raise ConfigError(f"--seconds must be a positive number, got {given.seconds}")
    turns = given.turns or _TURNS[device.type]
    with console.status("starting") as status:

        def say(message: str) -> None:
            status.update(message)
            if not console.is_terminal:
                typer.echo(f"  {message}", err=True)

        how = {"device": device, "turns": turns, "seconds": given.seconds, "say": say}
        record = _steps(given, how) if given.iteration is None else _iterations(given, how)
    console.print(as_table(record, console.width))
    for remark in remarks(record):
        console.print(f"  {remark}", highlight=False, markup=False)
    if given.json is not None:
        write(record, given.json)
    if given.chart is not None:
        chart.draw(record, given.chart)
    return 0


def tables(files: Sequence[Path], page: Path | None, charts: Path | None) -> None:
    """Print records as Markdown, or put them into a page; draw them."""
    # A page has them by name, so that it does not depend on who wrote it.
    records = [(file, read(file)) for file in (files if page is None else sorted(files))]
    text = markdown.as_markdown([record for _, record in records])
    if page is None:
        typer.echo(text, nl=False)
    else:
        markdown.fill(page, text, markdown.MARKS)
    if charts is not None:
        charts.mkdir(parents=True, exist_ok=True)
        for file, record in records:
            chart.draw(record, charts / f"{file.stem}.png")


def _steps(given: Timing, how: dict[str, Any]) -> Record:
    if given.shapes is not None and given.model is not None:
        raise ConfigError("--shapes and --model both say what to step on: give one of them")
    check_names("--dtype:", [given.dtype], DTYPES)
    cuda = how["device"].type == "cuda"
    field = _line_up(given, contenders() if cuda else DEFAULT_ON_CPU)
    name = given.model or given.shapes or ("vit_b" if cuda else "vit_b_third")
    if given.model is not None:
        model = build_model(given.model, "--model").model
        shapes = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    else:
        shapes = shapes_of(name)
    return measure_steps(field, shapes, name=name, dtype=DTYPES[given.dtype], **how)


def _iterations(given: Timing, how: dict[str, Any]) -> Record:
    for option, value in (("--shapes", given.shapes), ("--model", given.model)):
        if value is not None:
            raise ConfigError(f"--iteration trains a whole model: {option} has no place beside it")
    if given.dtype != "fp32":
        raise ConfigError(
            "--iteration keeps its parameters in fp32: --dtype has no place beside it"
        )
    if given.graph:
        raise ConfigError("--iteration has gradients that move: --graph has no place beside it")
    assert given.iteration is not None
    field = _line_up(given, DEFAULT_OF_ITERATIONS)
    return measure_iterations(field, given.iteration, batch=given.batch, **how)


def _line_up(given: Timing, default: Iterable[str]) -> list[Contender]:
    """The contenders, the reference first."""
    field = chosen(given.optimizer or (), given.without or (), default=default, graph=given.graph)
    if given.reference is None:
        return field
    table = contenders(graph=given.graph)
    check_names("--reference: the optimizer", [given.reference], table)
    rest = [c for c in field if c.name != given.reference]
    return [table[given.reference], *rest]


def _check_files(given: Timing) -> None:
    """Before minutes of measuring, not after them."""
    for option, file in (("--json", given.json), ("--chart", given.chart)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{option}: there is no folder {str(file.parent)!r}")
    if given.chart is None:
        return
    if given.chart.suffix not in chart.ENDINGS:
        raise ConfigError(
            f"--chart: the file must end in {', '.join(chart.ENDINGS)}, got {str(given.chart)!r}"
        )
    need("--chart", "matplotlib")
