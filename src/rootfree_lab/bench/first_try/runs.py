"""Runs on the laboratory's engine: one with its record, or many, one by one or side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.functional import pad

from rootfree_lab.bench.first_try import records
from rootfree_lab.bench.first_try.records import Record
from rootfree_lab.bench.first_try.suite import Run, is_convex
from rootfree_lab.files.appending import finite
from rootfree_lab.processes.side_by_side import Channel, each
from rootfree_lab.training import run as engine
from rootfree_lab.training.checking import dataset_of
from rootfree_lab.training.feeding import in_order
from rootfree_lab.training.session import Point, Session
from rootfree_lab.training.watching.progress import Watcher

Say = Callable[[str], None]

WINDOW = 50  # steps that a mean loss is of
_POINTS = 20  # of a curve
# A run that ends above its first loss by this factor has diverged, even without a NaN.
_WORSE = 1.1
# Below this, nearly all terms of a cross entropy in float32 are exactly zero.
_ROUNDING = torch.finfo(torch.float32).eps
# The seeds of the batches begin here: the same ones on every device and for every optimizer.
_ORDER = 1000


class _Losses(Watcher):
    """The loss of every step; with `whole` also that of all training data at the end."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self.steps: list[Tensor] = []
        self.full: float | None = None
        self.terms = 0

    def begin(self, session: Session) -> None:
        self.terms = session.terms
        session.feed.shuffle(_ORDER + session.config.train.seed)

    def stepped(self, session: Session) -> None:
        # A copy, which a replayed pass does not overwrite. The host does not wait for the device.
        self.steps.append(session.loss.detach().clone())

    def point(self, session: Session, point: Point) -> None:
        if self._whole:
            config = session.config
            data = dataset_of(config.data)
            batches = in_order(data, config.train, session.device, part="train")
            self.full, _ = session.evaluate(batches)


def train(run: Run) -> Record:
    """Train, measure, and return the record."""
    config, losses = run.config, _Losses(whole=is_convex(run.record.task))
    with TemporaryDirectory() as folder:
        try:
            found = engine.train(
                config, out=Path(folder), watchers=[losses], keep=lambda record: None
            )
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            found = engine.failed_record(config, error)
    record = replace(
        run.record,
        batch_size=losses.terms,
        test_loss=found["final"]["test_loss"],
        test_error=found["final"]["test_error"],
        seconds=round(found["seconds"]["total"] or 0.0, 2),
        failure=found.get("failure", {}).get("message"),
        torch=torch.__version__,
    )
    known = losses.steps or [torch.tensor(math.nan)]  # none: the first step has failed
    return with_losses(record, torch.stack(known).cpu(), full=losses.full)


def with_losses(record: Record, losses: Tensor, *, full: float | None) -> Record:
    """The record with figures from the losses of its steps; steps that were not made count as NaN.

    `full` replaces the mean of the last losses as the final loss.
    """
    losses = pad(losses.double(), (0, record.steps - len(losses)), value=math.nan)
    means = losses.unfold(0, min(WINDOW, len(losses)), 1).mean(1)
    last, first = float(means[-1]), float(losses[0])
    known = means[means.isfinite()]
    best = float(known.min()) if len(known) else math.nan
    final = last if full is None else full
    ends = torch.linspace(0, len(losses), _POINTS + 1).round().long().tolist()
    parts = [(a, b) for a, b in pairwise(ends) if b > a]
    return replace(
        record,
        curve=[(b, finite(float(losses[a:b].mean()))) for a, b in parts],
        first_loss=finite(first),
        final_loss=finite(final),
        best_mean=finite(best),
        late_ratio=finite(max(last, _ROUNDING) / max(best, _ROUNDING)),
        diverged=not (math.isfinite(final) and math.isfinite(last) and last <= _WORSE * first),
    )


def perform(
    runs: Sequence[Run], file: Path | None, *, jobs: int, say: Say
) -> tuple[list[Record], int]:
    """All records that the runs ask for, in their order, and how many runs failed.

    Runs in the file are not repeated; each new record is appended at once.
    """
    known = {r.key: r for r in records.read(file)} if file is not None and file.exists() else {}
    keys = [run.record.key for run in runs]
    todo = [run for run, key in zip(runs, keys, strict=True) if key not in known]
    if len(todo) < len(runs):
        say(f"{len(runs) - len(todo)} of {len(runs)} runs are in {file} already")
    failed = 0
    one_by_one = jobs == 1 or len(todo) < 2
    results = ((run, _attempt(run)) for run in todo) if one_by_one else each(_attempt, todo, jobs)
    for number, (run, result) in enumerate(results, 1):
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


def _attempt(run: Run, channel: Channel | None = None) -> Record | str:
    """The record of a run, or what went wrong: a failing run does not end the others."""
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
