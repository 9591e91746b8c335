"""Steps of all contenders on one set of parameters, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rootfree_lab.bench.ceilings import Ceilings, measure_ceilings
from rootfree_lab.bench.contenders import GRAPH, Built, Contender
from rootfree_lab.bench.floors import Work
from rootfree_lab.bench.memory import free_bytes, release, state_bytes, temporary_bytes
from rootfree_lab.bench.record import StepRecord, StepRow, environment
from rootfree_lab.bench.timing import Gradients, Runner, amortised, by_kind
from rootfree_lab.bench.turns import OUT_OF_MEMORY, Say, Turns, why

TOGETHER, BESIDE = "all together", "one at a time beside the reference"
_ROOM = 0.7  # of the free memory may be held; the rest is for temporaries


@dataclass
class _Entry:
    """A contender that was built, warmed up and measured for memory."""

    built: Built
    runner: Runner
    temporary: int | None


class _Measurement:
    """What all contenders of one run share."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device,
        *, turns: int, seconds: float, say: Say,
    ) -> None:  # fmt: skip
        self.shapes, self.dtype, self.device, self._seconds = shapes, dtype, device, seconds
        self.gradients = Gradients(shapes, dtype, device)
        self.count = sum(torch.Size(s).numel() for s in shapes)
        self.work: dict[str, Work] = {}  # by name, of those whose floor is known
        self.turns = Turns(
            StepRow, self.enter, lambda entry, _: entry.runner.turn(), self.row,
            device=device, turns=turns, seconds=seconds, say=say,
        )  # fmt: skip

    def enter(self, contender: Contender) -> _Entry:
        """Build and warm up."""
        generator = torch.Generator(self.device).manual_seed(0)
        parameters = [
            nn.Parameter(
                torch.randn(tuple(s), device=self.device, generator=generator).to(self.dtype)
            )
            for s in self.shapes
        ]
        self.gradients.attach(parameters)
        built = contender.build(parameters)
        runner = Runner(built.step, contender.period, self.gradients, self.device)
        runner.warm_up(self._seconds / 2)
        held_in_pool = contender.name.endswith(GRAPH)
        temporary = None if held_in_pool else temporary_bytes(runner.period, self.device)
        return _Entry(built, runner, temporary)

    def row(self, contender: Contender, entry: _Entry) -> StepRow:
        """The figures of a contender without ratio and floor; its work is stored for the floor."""
        built, periods = entry.built, entry.runner.periods
        refresh_ms, plain_ms = by_kind(periods)
        finite = all(bool(p.isfinite().all()) for p in built.parameters)
        row = StepRow(
            name=contender.name,
            family=contender.family,
            period=contender.period,
            note=None if finite else "parameters were no longer finite",
            ms=amortised(periods),
            refresh_ms=refresh_ms,
            plain_ms=plain_ms,
            device_ms=entry.runner.device_ms(),
            state_bytes_per_parameter=state_bytes(built.optimizers, built.parameters) / self.count,
            temporary_bytes=entry.temporary,
        )
        try:
            work = contender.floor(built)
        except Exception as error:  # an optimizer that keeps its state in another way than we know
            return replace(row, note=f"no floor, {why(error)}")
        if work is not None:
            self.work[contender.name] = work
        return row


def measure_steps(
    contenders: Sequence[Contender],
    shapes: Sequence[Sequence[int]],
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    turns: int,
    seconds: float,
    say: Say = lambda message: None,
) -> StepRecord:
    """Time the contenders; the first is the reference of the ratios.

    All contenders exist at once and take turns if memory suffices. Otherwise each one takes turns
    with the reference alone, and its ratio refers to those turns of the reference.
    """
    say("ceilings")
    ceilings = measure_ceilings(device)
    run = _Measurement(shapes, dtype, device, turns=turns, seconds=seconds, say=say)
    together = sum(c.room for c in contenders) * run.count
    arrangement = TOGETHER if together < _ROOM * free_bytes(device) else BESIDE
    if arrangement == TOGETHER:
        rows = run.turns.rows(contenders)
        crowded = [c for c in contenders[1:] if rows[c.name].failure == OUT_OF_MEMORY]
        if crowded:
            alone = _beside(run, contenders[0], crowded)
            rows |= {c.name: alone[c.name] for c in crowded}
    else:
        rows = _beside(run, contenders[0], contenders[1:])
    # A shared machine may have been slow at the start; a ceiling is the best of both.
    ceilings = ceilings.best(measure_ceilings(device))
    rows |= {n: with_floor(rows[n], work, ceilings) for n, work in run.work.items() if rows[n].ms}
    return StepRecord(
        parameters=name,
        count=run.count,
        tensors=len(shapes),
        dtype=str(dtype).removeprefix("torch."),
        reference=contenders[0].name,
        arrangement=arrangement,
        settings={"turns": turns, "seconds": seconds},
        environment=environment(device),
        ceilings=ceilings,
        rows=[rows[c.name] for c in contenders],
    )


def _beside(run: _Measurement, first: Contender, others: Sequence[Contender]) -> dict[str, StepRow]:
    """Time each of the others with the reference alone; the reference's row has all its turns."""
    rows: dict[str, StepRow] = {}
    taken: list[list[float]] = []
    try:
        reference: _Entry | None = run.enter(first)
    except Exception:  # reported when it is entered again
        reference = None

    def enter(contender: Contender) -> _Entry:
        entered = reference if contender is first else None
        return run.enter(contender) if entered is None else entered

    for field in [[first, other] for other in others] or [[first]]:
        rows |= replace(run.turns, enter=enter).rows(field)
        if reference is not None:
            taken += reference.runner.periods
            reference.runner.periods = []
        release(run.device)
    if reference is not None and taken:
        reference.runner.periods = taken
        rows[first.name] = replace(run.row(first, reference), ratio=1.0)
    return rows


def with_floor(row: StepRow, work: Work, ceilings: Ceilings) -> StepRow:
    """The row with the work of its step, and how far the step is from its floor."""
    dtype, T = str(work.matmul_dtype).removeprefix("torch."), row.period
    rate = ceilings.rate(dtype)

    def floor(moved: float, flops: float) -> float:
        # Copies and products can overlap, so the longer of the two is the floor of a step.
        return max(moved / ceilings.copy, flops / rate) / 1e9

    def mean(refresh: float, plain: float) -> float:
        return (refresh + (T - 1) * plain) / T

    assert row.ms is not None
    moved = mean(work.refresh_bytes, work.plain_bytes)
    flops = mean(work.refresh_flops, work.plain_flops)
    floor_ms = mean(
        floor(work.refresh_bytes, work.refresh_flops), floor(work.plain_bytes, work.plain_flops)
    )
    return replace(
        row,
        bytes_moved=moved,
        flops=flops,
        terabytes_per_second=moved / row.ms.median / 1e9,
        teraflops_per_second=flops / row.ms.median / 1e9,
        matmul_dtype=dtype if flops else None,
        floor_ms=floor_ms,
        times_floor=row.ms.median / floor_ms,
    )
