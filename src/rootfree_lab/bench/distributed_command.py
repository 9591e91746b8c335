"""What `rootfree bench --distributed-model` does with its arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import typer
from rich.console import Console

from rootfree_lab.bench.distributed_model import MODELS, OPTIMIZERS, RANKS, Cost, Speeds, cost
from rootfree_lab.bench.markdown import Marks, fill, filled, rows
from rootfree_lab.bench.options import Distributed
from rootfree_lab.config.reading import ConfigError

MARKS = Marks("distributed model")
_HEADINGS = (
    "model", "optimizer", "sent", "operations", "imbalance", "state", "exchange + products",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """An optimizer on a model and so many ranks."""

    model: str
    ranks: int
    optimizer: str
    cost: Cost


def lines(models: Iterable[str] = MODELS, ranks: Iterable[int] = RANKS) -> list[Line]:
    """Every optimizer on every model; small models on many ranks have little to share."""
    counts = list(ranks)
    return [
        Line(model, count, optimizer, cost(model, count, optimizer))
        for model in models
        for count in counts
        for optimizer in OPTIMIZERS
    ]


def cells(line: Line, speeds: Speeds) -> list[str]:
    """As the table shows it."""
    found = line.cost
    return [
        f"{line.model} on {line.ranks:,}",
        line.optimizer,
        f"{found.sent / 1e6:,.0f} MB",
        f"{found.flops / 1e12:,.3g} T",
        f"{found.imbalance:.2f}",
        f"{found.state / 1e9:,.2f} GB",
        f"{1e3 * found.seconds(line.ranks, speeds):,.1f} ms",
    ]


def run(console: Console, given: Distributed) -> int:
    """Count, show, and write what was asked for."""
    for name in ("node_link", "link", "matmul"):
        value = getattr(given, name)
        if not (value > 0 and math.isfinite(value)):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be a positive number, got {value}")
    if given.page is not None:
        filled(given.page, "", MARKS)  # before seconds of planning, not after them
    speeds = Speeds(given.node_link * 1e9, given.link * 1e9, given.matmul * 1e12)
    with console.status("planning"):
        found = lines()
    table = "\n".join(rows(_HEADINGS, [cells(line, speeds) for line in found])) + "\n"
    if given.page is None:
        typer.echo(table, nl=False)
    else:
        fill(given.page, table, MARKS)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(line) for line in found], indent=1) + "\n")
    return 0
