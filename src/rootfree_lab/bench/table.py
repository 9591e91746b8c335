"""A record as a table for the terminal, and the cells that every table shares."""

from __future__ import annotations

from rich.table import Table

from rootfree_lab.bench.record import IterationRow, Record, StepRecord, StepRow

NOTHING = "-"
STEP_HEADINGS = (
    "optimizer", "ms a step", "quartiles", "ratio", "refresh / plain", "host ahead",
    "state B/param", "temporary", "TB/s", "TFLOP/s", "floor ms", "x floor",
)  # fmt: skip
ITERATION_HEADINGS = (
    "optimizer", "iteration ms", "quartiles", "ratio", "forward", "backward", "optimizer ms",
    "peak memory",
)  # fmt: skip
#: what a narrow terminal does without, the first first
_DETAILS = (
    "host ahead", "temporary", "TFLOP/s", "TB/s", "floor ms", "quartiles", "peak memory",
    "refresh / plain", "forward", "backward", "state B/param",
)  # fmt: skip


def title(record: Record) -> str:
    """What was measured, where and when."""
    where = f"{record.environment.device}, torch {record.environment.versions['torch']}"
    if isinstance(record, StepRecord):
        what = (
            f"{record.parameters}: {record.count / 1e6:.1f} M {record.dtype} parameters in "
            f"{record.tensors} tensors"
        )
    else:
        what = (
            f"Training iterations of {record.model}: {record.count / 1e6:.1f} M parameters, batch "
            f"{record.batch}, autocast {record.autocast}"
        )
    return f"{what}; {where}, {record.environment.date}"


def caption(record: Record) -> str:
    """The reference and the ceilings."""
    text = f"Ratios are to {record.reference}."
    if isinstance(record, StepRecord):
        c = record.ceilings
        text += (
            f" Contenders took turns {record.arrangement}. Ceilings measured in this run: copy "
            f"{number(c.copy)} TB/s, bf16 products {number(c.bf16)} TFLOP/s, fp32 products "
            f"{number(c.fp32)} TFLOP/s."
        )
    return text


def headings(record: Record) -> tuple[str, ...]:
    """Of the columns."""
    return STEP_HEADINGS if isinstance(record, StepRecord) else ITERATION_HEADINGS


def cells(record: Record) -> list[tuple[str, ...]]:
    """The rows; that of a contender that failed is its name and the reason."""
    if isinstance(record, StepRecord):
        return [_step_cells(row, record) for row in record.rows]
    return [_iteration_cells(row) for row in record.rows]


def as_table(record: Record, width: int) -> Table:
    """For a terminal of this width; columns that do not fit are left out, details first."""
    columns = list(zip(headings(record), *cells(record), strict=True))
    for detail in _DETAILS:
        if sum(max(map(len, column)) + 3 for column in columns) + 1 <= width:
            break
        columns = [column for column in columns if column[0] != detail]
    table = Table(title=title(record), caption=caption(record))
    for place, (heading, *_) in enumerate(columns):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in zip(*[column[1:] for column in columns], strict=True):
        table.add_row(*row)
    return table


def remarks(record: Record) -> list[str]:
    """Why some contenders have no figures, and what to know about others."""
    said: dict[str, list[str]] = {}
    for row in record.rows:
        if row.failure:
            said.setdefault(f"not measured, {row.failure}", []).append(row.name)
        elif isinstance(row, StepRow) and row.note:
            said.setdefault(row.note, []).append(row.name)
    return [f"{'; '.join(names)}: {what}" for what, names in said.items()]


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return NOTHING
    if abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def size(value: int | None) -> str:
    """Bytes, in a unit that suits them."""
    if value is None:
        return NOTHING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{number(value / scale)} {unit}"
    return f"{value} B"


def _step_cells(row: StepRow, record: StepRecord) -> tuple[str, ...]:
    if row.ms is None:
        return (row.name, *[NOTHING] * (len(STEP_HEADINGS) - 1))
    kinds = f"{number(row.refresh_ms)} / {number(row.plain_ms)}" if row.refresh_ms else NOTHING
    rate = record.ceilings.rate(row.matmul_dtype)
    return (
        row.name,
        number(row.ms.median),
        f"{number(row.ms.lower)} to {number(row.ms.upper)}",
        number(row.ratio),
        kinds,
        number(row.device_ms),
        NOTHING
        if row.state_bytes_per_parameter is None
        else f"{row.state_bytes_per_parameter:.1f}",
        size(row.temporary_bytes),
        _share(row.terabytes_per_second, record.ceilings.copy),
        _share(row.teraflops_per_second, rate) if row.flops else NOTHING,
        number(row.floor_ms),
        number(row.times_floor),
    )


def _iteration_cells(row: IterationRow) -> tuple[str, ...]:
    if row.ms is None:
        return (row.name, *[NOTHING] * (len(ITERATION_HEADINGS) - 1))
    return (
        row.name,
        number(row.ms.median),
        f"{number(row.ms.lower)} to {number(row.ms.upper)}",
        f"{row.ratio:.3f}" if row.ratio else NOTHING,
        number(row.forward_ms),
        number(row.backward_ms),
        number(row.optimizer_ms),
        size(row.peak_bytes),
    )


def _share(value: float | None, ceiling: float) -> str:
    return NOTHING if value is None else f"{number(value)} ({value / ceiling:.0%})"
