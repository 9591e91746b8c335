"""Steps of all contenders on one set of parameters, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rootfree_lab.bench.ceilings import Ceilings, measure_ceilings
from rootfree_lab.bench.contenders import GRAPH, Built, Contender, NotApplicableError
from rootfree_lab.bench.floors import Work
from rootfree_lab.bench.memory import free_bytes, release, state_bytes, temporary_bytes
from rootfree_lab.bench.record import StepRecord, StepRow, environment
from rootfree_lab.bench.timing import Gradients, Runner, amortised, by_kind, take_turns
from rootfree_lab.config.reading import ConfigError

TOGETHER, BESIDE = "all together", "one at a time beside the reference"
OUT_OF_MEMORY = "out of memory"
_ROOM = 0.7  # of the free memory may be held; the rest is for temporaries

Say = Callable[[str], None]


@dataclass
class _Entry:
    """A contender that was built, warmed up and measured for memory."""

    contender: Contender
    built: Built
    runner: Runner
    temporary: int | None
    device_ms: float | None = None

    def finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.built.parameters)


class _Measurement:
    """What all contenders of one run share."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device,
        *, turns: int, seconds: float, say: Say,
    ) -> None:  # fmt: skip
        self.shapes, self.dtype, self.device = shapes, dtype, device
        self.turns, self.seconds, self.say = turns, seconds, say
        self.gradients = Gradients(shapes, dtype, device)
        self.count = sum(torch.Size(s).numel() for s in shapes)
        self.work: dict[str, Work] = {}  # by name, of those whose floor is known

    def enter(self, contender: Contender) -> _Entry | StepRow:
        """Build and warm up; a row that tells why if that fails."""
        self.say(contender.name)
        try:
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
            runner.warm_up(self.seconds / 2)
            held_in_pool = contender.name.endswith(GRAPH)
            temporary = None if held_in_pool else temporary_bytes(runner.period, self.device)
            return _Entry(contender, built, runner, temporary)
        except Exception as error:  # whatever goes wrong in one of them, the others are measured
            return failed(contender, error)

    def race(self, entries: Sequence[_Entry]) -> dict[str, StepRow]:
        """Let them take turns; rows of those that failed on the way.  Changes their runners."""
        there = {entry.contender.name: entry for entry in entries}
        runners = {name: entry.runner for name, entry in there.items()}

        def ahead(name: str, number: int) -> None:
            there[name].device_ms = runners[name].device_ms()

        failures = take_turns(
            runners, lambda name, _: runners[name].turn(), turns=self.turns, seconds=self.seconds
        )
        sound = {name: runner for name, runner in runners.items() if name not in failures}
        failures |= take_turns(sound, ahead, turns=1, seconds=self.seconds)
        return {name: failed(there[name].contender, error) for name, error in failures.items()}

    def row(self, entry: _Entry) -> StepRow:
        """The figures of a contender, all but ratio and floor; its work is kept for the floor."""
        contender, built = entry.contender, entry.built
        refresh_ms, plain_ms = by_kind(entry.runner.periods)
        row = StepRow(
            name=contender.name,
            family=contender.family,
            period=contender.period,
            note=None if entry.finite() else "parameters were no longer finite",
            ms=amortised(entry.runner.periods),
            refresh_ms=refresh_ms,
            plain_ms=plain_ms,
            device_ms=entry.device_ms,
            state_bytes_per_parameter=state_bytes(built.optimizers, built.parameters) / self.count,
            temporary_bytes=entry.temporary,
        )
        try:
            work = contender.floor(built)
        except Exception as error:  # an optimizer that keeps its state in another way than we know
            return replace(row, note=f"no floor, {reason(error)}")
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

    All are alive at once and take turns while memory lasts. If they do not fit, the reference stays
    and each of the others takes turns with it alone; its ratio is to the reference's turns beside
    it.
    """
    say("ceilings")
    ceilings = measure_ceilings(device)
    run = _Measurement(shapes, dtype, device, turns=turns, seconds=seconds, say=say)
    together = sum(c.room for c in contenders) * run.count
    arrangement = TOGETHER if together < _ROOM * free_bytes(device) else BESIDE
    if arrangement == TOGETHER:
        rows = _together(run, contenders)
        crowded = [c for c in contenders[1:] if rows[c.name].failure == OUT_OF_MEMORY]
        if crowded:
            alone = _beside(run, contenders[0], crowded)
            rows |= {c.name: alone[c.name] for c in crowded}
    else:
        rows = _beside(run, contenders[0], contenders[1:])
    # A machine that is shared may have been slow just then; a ceiling is the best it can do.
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


def _together(run: _Measurement, contenders: Sequence[Contender]) -> dict[str, StepRow]:
    rows: dict[str, StepRow] = {}
    entries: list[_Entry] = []
    for contender in contenders:
        entered = run.enter(contender)
        if isinstance(entered, StepRow):
            rows[contender.name] = entered
            release(run.device)
        else:
            entries.append(entered)
    run.say("taking turns")
    rows |= run.race(entries)
    rows |= {e.contender.name: run.row(e) for e in entries if e.contender.name not in rows}
    reference = rows[contenders[0].name].ms
    if reference is None:
        return rows
    return {
        name: replace(row, ratio=row.ms.median / reference.median) if row.ms else row
        for name, row in rows.items()
    }


def _beside(run: _Measurement, first: Contender, others: Sequence[Contender]) -> dict[str, StepRow]:
    rows: dict[str, StepRow] = {}
    reference = run.enter(first)
    taken: list[list[float]] = []
    for contender in others:
        entered = run.enter(contender)
        if isinstance(entered, StepRow):
            rows[contender.name] = entered
            release(run.device)
            continue
        pair = [entered] if isinstance(reference, StepRow) else [reference, entered]
        rows |= run.race(pair)
        if contender.name not in rows:
            row = run.row(entered)
            if not isinstance(reference, StepRow) and row.ms:
                beside = amortised(reference.runner.periods).median
                row = replace(row, ratio=row.ms.median / beside)
            rows[contender.name] = row
        if not isinstance(reference, StepRow):
            taken += reference.runner.periods
            reference.runner.periods, reference.runner.seconds = [], 0.0
        del entered, pair
        release(run.device)
    if isinstance(reference, StepRow):
        return rows | {first.name: reference}
    if not taken:
        run.race([reference])
        taken = reference.runner.periods
    reference.runner.periods = taken
    return rows | {first.name: replace(run.row(reference), ratio=1.0)}


def with_floor(row: StepRow, work: Work, ceilings: Ceilings) -> StepRow:
    """The row with what its step has to do, and how far from that it is."""
    rate, T = ceilings.rate(work.matmul_dtype), row.period

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
        matmul_dtype=str(work.matmul_dtype).removeprefix("torch.") if flops else None,
        floor_ms=floor_ms,
        times_floor=row.ms.median / floor_ms,
    )


def failed(contender: Contender, error: Exception) -> StepRow:
    """The row of a contender that could not be measured."""
    return StepRow(contender.name, contender.family, contender.period, failure=reason(error))


def reason(error: Exception) -> str:
    """One line."""
    if isinstance(error, NotApplicableError | ConfigError):
        return str(error)
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if no_memory or "not enough memory" in str(error):
        return OUT_OF_MEMORY
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]
