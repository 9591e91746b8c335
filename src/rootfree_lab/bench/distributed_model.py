"""What a step of large models costs each of many ranks under FSDP2: counted, nothing runs.

Hidden matrices (m, n) are sharded by rows over W ranks. Embedding, head and vectors are AdamW's
everywhere. Gradients and directions travel in bfloat16, state is float32. Sent bytes are those of
the mean rank, work and state those of the busiest and fullest.

- AdamW works by elements: nothing travels.
- Muon takes whole matrices, W of one shape at a time, each to a rank of its own and back. The last
  W of a shape are filled up (as in microsoft/dion).
- Distributed Shampoo cuts FSDP2's shards into blocks. Nothing travels, and the result depends on W.
  Inverse roots are made every hundred steps.
- IFShampoo cuts whole matrices into blocks, each with an owner, as `rootfree.placement` plans them,
  and refreshes every second step.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import typer
from rich.console import Console

from rootfree.placement.forecast import forecast
from rootfree_lab.bench.markdown import Marks, fill, filled, rows
from rootfree_lab.bench.options import Distributed
from rootfree_lab.config.reading import ConfigError

Shape = tuple[int, ...]

BLOCK = 1024
_FP32, _BF16 = 4, 2
_ADAM_STATE = 2 * _FP32  # bytes of an element: two moments
_ADAM_FLOPS = 12  # of an element, about
_NEWTON_SCHULZ = 5
_ROOT_EVERY = 100
_ROOT_FLOPS = 10  # times d³: an eigendecomposition, about
_NODE = 8  # ranks that the fast links connect


@dataclass(frozen=True)
class Model:
    """A Llama-like transformer."""

    layers: int
    width: int
    feed_forward: int
    keys: int  # width of keys and of values
    vocabulary: int

    @property
    def hidden(self) -> Sequence[Shape]:
        """The matrices of all layers."""
        d, f, k = self.width, self.feed_forward, self.keys
        return self.layers * [(d, d), (k, d), (k, d), (d, d), (f, d), (f, d), (d, f)]

    @property
    def rest(self) -> int:
        """Elements of everything else: embedding, head, norms."""
        return 2 * self.vocabulary * self.width + (2 * self.layers + 1) * self.width


MODELS = {
    "1.1B": Model(22, 2048, 5632, 256, 32000),
    "8B": Model(32, 4096, 14336, 1024, 128256),
    "70B": Model(80, 8192, 28672, 1024, 128256),
}
RANKS = (8, 64, 1024)


@dataclass(frozen=True)
class Cost:
    """Of one step, for a rank."""

    sent: float  # bytes
    flops: float
    imbalance: float  # the work of the busiest rank over the mean
    state: float  # bytes

    def seconds(self, ranks: int, speeds: Speeds) -> float:
        """Exchange, then products; rounds that overlap take less, passes over memory are apart."""
        return self.sent / speeds.link_of(ranks) + self.flops / speeds.matmul


@dataclass(frozen=True)
class Speeds:
    """What machines can do: bytes a second of a rank, and operations a second."""

    node: float = 300e9
    link: float = 40e9
    matmul: float = 400e12

    def link_of(self, ranks: int) -> float:
        """The slowest link between so many ranks."""
        return self.node if ranks <= _NODE else self.link


def adamw(hidden: Sequence[Shape], rest: int, ranks: int) -> Cost:
    """Every element where it is."""
    elements = sum(map(math.prod, hidden)) + rest
    return Cost(0.0, _ADAM_FLOPS * elements / ranks, 1.0, _ADAM_STATE * elements / ranks)


def muon(hidden: Sequence[Shape], rest: int, ranks: int) -> Cost:
    """Five Newton-Schulz iterations of a matrix on one rank."""
    sent = busiest = total = 0.0
    for shape, count in Counter(hidden).items():
        m, n = sorted(shape)
        turns = math.ceil(count / ranks)
        work = _NEWTON_SCHULZ * (4.0 * m * m * n + 2.0 * m**3)
        # A rank sends its shards of W - 1 matrices there, and W - 1 shards of its own back.
        sent += 2 * turns * _BF16 * m * n * (ranks - 1) / ranks
        busiest += turns * work
        total += count * work
    momentum = _FP32 * sum(map(math.prod, hidden)) / ranks
    others = adamw([], rest, ranks)
    return Cost(sent, busiest + others.flops, busiest * ranks / total, momentum + others.state)


def distributed_shampoo(hidden: Sequence[Shape], rest: int, ranks: int) -> Cost:
    """Blocks of the rows that a rank has; every rank is as busy as the first."""
    flops = state = 0.0
    for m, n in hidden:
        mine = math.ceil(m / ranks)
        across, along = math.ceil(mine / BLOCK), math.ceil(n / BLOCK)
        r, c, blocks = mine / across, n / along, across * along
        flops += 4 * mine * n * (r + c) + blocks * _ROOT_FLOPS * (r**3 + c**3) / _ROOT_EVERY
        # Sums and their inverse roots; momentum, and the second moment of the grafted step.
        state += 2 * _FP32 * (blocks * (r**2 + c**2) + mine * n)
    others = adamw([], rest, ranks)
    return Cost(0.0, flops + others.flops, 1.0, state + others.state)


def if_shampoo(
    hidden: Sequence[Shape], rest: int, ranks: int, *, block_size: int = BLOCK,
    product_bytes: int = _BF16, state_bytes: int = _FP32,
) -> Cost:  # fmt: skip
    """The plan of this library."""
    plan = forecast(
        hidden, world=ranks, block_size=block_size, product_bytes=product_bytes,
        factor_bytes=state_bytes, momentum_bytes=state_bytes,
    )  # fmt: skip
    others = adamw([], rest, ranks)
    flops, state = max(plan.flops) + others.flops, max(plan.state_bytes) + others.state
    return Cost(sum(plan.sent) / ranks, flops, plan.imbalance, state)


OPTIMIZERS: dict[str, Callable[[Sequence[Shape], int, int], Cost]] = {
    "AdamW": adamw,
    "Muon": muon,
    "Distributed Shampoo": distributed_shampoo,
    "IFShampoo": if_shampoo,
}


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


def lines(models: Iterable[str] = MODELS, ranks: Sequence[int] = RANKS) -> list[Line]:
    """Every optimizer on every model and number of ranks."""
    return [
        Line(model, count, optimizer, cost(MODELS[model].hidden, MODELS[model].rest, count))
        for model in models
        for count in ranks
        for optimizer, cost in OPTIMIZERS.items()
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
