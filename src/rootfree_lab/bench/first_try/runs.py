"""Many runs: those that the file has not got yet, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rootfree_lab.bench.first_try import records
from rootfree_lab.bench.first_try.records import Record
from rootfree_lab.bench.first_try.suite import Run
from rootfree_lab.bench.first_try.training import train
from rootfree_lab.processes.side_by_side import Event, each

Say = Callable[[str], None]


def perform(
    runs: Sequence[Run], file: Path | None, *, jobs: int, say: Say
) -> tuple[list[Record], int]:
    """All records that the runs ask for, in their order, and how many runs failed.

    What is in the file is not run again; each new record is appended as soon as it is there.
    """
    known = {r.key: r for r in records.read(file)} if file is not None and file.exists() else {}
    keys = [run.record.key for run in runs]
    todo = [run for run, key in zip(runs, keys, strict=True) if key not in known]
    if len(todo) < len(runs):
        say(f"{len(runs) - len(todo)} of {len(runs)} runs are in {file} already")
    failed = 0
    for number, (run, result) in enumerate(_results(todo, jobs), 1):
        asked = run.record
        what = f"[{number}/{len(todo)}] {asked.task}, {asked.label}, seed {asked.seed}"
        if isinstance(result, str):
            failed += 1
            say(f"{what}: failed, {result}")
            continue
        known[result.key] = result
        if file is not None:
            records.append(file, result)
        say(f"{what}: {_outcome(result)}")
    return [known[key] for key in keys if key in known], failed


def _results(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, Record | str]]:
    if jobs == 1 or len(runs) < 2:
        for run in runs:
            yield run, _attempt(run)
        return
    for run, result in each(_attempt, runs, jobs):
        # A worker that the system killed has no result.
        yield run, result.content if isinstance(result, Event) else result


def _attempt(run: Run) -> Record | str:
    """One run that fails does not take the others with it: what went wrong, in its place."""
    try:
        return train(run)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _outcome(record: Record) -> str:
    if record.diverged:
        return f"diverged{f' ({record.failure})' if record.failure else ''}, {record.seconds:.1f} s"
    assert record.final_loss is not None
    test = "" if record.test_error is None else f", test error {record.test_error:.1%}"
    return f"loss {record.final_loss:.4g}{test}, {record.seconds:.1f} s"
