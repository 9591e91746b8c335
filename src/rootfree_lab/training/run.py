"""Train one run: from the start or a checkpoint, to a record or an interruption."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from filelock import Timeout

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.config.settings import Config
from rootfree_lab.data import DataError
from rootfree_lab.files import checkpoints, weights
from rootfree_lab.files.records import Record, append_record, describe, read_records, versions
from rootfree_lab.files.run_lock import alone
from rootfree_lab.processes.stopping import Interrupted, StopSignals
from rootfree_lab.training import parallel
from rootfree_lab.training.devices import choose_device
from rootfree_lab.training.divergence import Diverged
from rootfree_lab.training.reproducibility import allow_other_kernels, deterministic_algorithms
from rootfree_lab.training.rollback import go_back, keep_state
from rootfree_lab.training.session import Session
from rootfree_lab.training.watching.loggers import loggers
from rootfree_lab.training.watching.measures import PARTS, reset_peak
from rootfree_lab.training.watching.progress import Watcher

# Steps between checks of the loss, each of which waits for the device.
CHECK_EVERY = 20


def records_path(out: Path) -> Path:
    """The records file of an output folder."""
    return out / "records.jsonl"


def make_output_folder(out: Path) -> None:
    """Make the output folder now, so that hours of training do not end with a write error."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        writable = os.access(out, os.W_OK)
    except OSError:  # a file is in the way, or the folder above may not be written
        writable = False
    if not writable:
        raise ConfigError(f"--out must be a folder that can be written, got {str(out)!r}")


def finished_record(out: Path, config: Config) -> Record | None:
    """The record of exactly this run, if it was completed or has diverged."""
    found = None
    for record in read_records(records_path(out)):
        kind = (record.get("failure") or {}).get("kind")
        ended = record.get("completed") or kind == "diverged"
        if record.get("identity") == config.identity() and ended:
            found = record
    return found


def known_record(out: Path, config: Config) -> Record | None:
    """The record of exactly this run; one under a former label is written anew under this one."""
    found = finished_record(out, config)
    if found is None or found["label"] == config.label:
        return found
    renamed = {**found, "label": config.label}
    append_record(records_path(out), renamed)
    return renamed


def train(
    config: Config,
    *,
    out: Path,
    resume: bool = False,
    stop: StopSignals | None = None,
    watchers: Sequence[Watcher] = (),
    keep: Callable[[Record], None] | None = None,
) -> Record:
    """Run to the end, append the record to the folder's records file and return it.

    `keep` stores the record elsewhere instead, also one that was there; the checkpoint is removed
    when it returns.

    One process at a time trains a run: others wait, and return its record. With `resume`, a run
    that has a record is not trained again. A diverged run is recorded too, as not completed. When
    `stop` receives a signal, the run saves a checkpoint and raises `Interrupted`.
    """
    make_output_folder(out)
    device = choose_device(config.train.device)
    mode, batch_size = config.train.parallel, config.train.batch_size
    ranks, device = parallel.start(mode, device, batch_size=batch_size)
    # The first rank looks for a record; the others do what it does.
    with alone(out, config, stop) if ranks.first else nullcontext(False) as waited:
        looks = ranks.first and (resume or waited)
        done = ranks.gathered(finished_record(out, config) if looks else None)[0]
        if done is not None:  # by another process
            found: Record = done
            if ranks.first:
                if keep is not None:
                    keep({**found, "label": config.label})
                _remove(checkpoints.checkpoint_path(out, config))
            return found
        return _train(config, out, resume, stop, watchers, keep, ranks, device)


def train_or_resume(config: Config, **how: Any) -> Record:
    """Train from the checkpoint if there is one; anew if its optimizer cannot be resumed."""
    try:
        return train(config, resume=True, **how)
    except checkpoints.CheckpointError:
        return train(config, resume=False, **how)


def _train(
    config: Config,
    out: Path,
    resume: bool,
    stop: StopSignals | None,
    watchers: Sequence[Watcher],
    keep: Callable[[Record], None] | None,
    ranks: parallel.Ranks,
    device: torch.device,
) -> Record:
    path = checkpoints.checkpoint_path(out, config)
    all_watchers = [*watchers, *loggers(config.output, out)] if ranks.first else []
    with deterministic_algorithms(config.train.deterministic, device):
        saved = checkpoints.load(path, config) if resume and path.exists() else None
        session = Session(config, device, ranks)
        if device.type == "cuda" and config.train.deterministic and ranks.alone:
            reason = session.why_not_deterministic()
            reset_peak(device)  # the trial is no part of the run
            if reason is not None:
                allow_other_kernels(reason)
        if saved is not None:
            session.restore(saved)
        try:
            for watcher in all_watchers:
                watcher.begin(session)
            record = _run(session, path, stop, all_watchers)
        finally:
            for watcher in all_watchers:
                watcher.end()
    if config.output.weights and record["completed"]:
        state = ranks.model_state(session.model)  # all ranks must ask
        if ranks.first:
            weights.save(weights.weights_path(out, config), state)
    if ranks.first:
        (keep or partial(append_record, records_path(out)))(record)
        _remove(path)
    return record


def _remove(path: Path) -> None:
    """Remove the checkpoint of a recorded run; failing to do so is not a failure of the run."""
    try:
        checkpoints.remove(path)
    except OSError as error:
        typer.echo(f"{str(path)!r} cannot be removed: {error.strerror}", err=True)


def sweep(out: Path, config: Config) -> None:
    """Remove the checkpoint of a recorded run whose process was killed before it could."""
    path = checkpoints.checkpoint_path(out, config)
    if checkpoints.files(path):
        with suppress(Timeout), alone(out, config, waits=False):
            _remove(path)


def _run(
    session: Session, path: Path, stop: StopSignals | None, watchers: Sequence[Watcher]
) -> Record:
    session.watch.start()
    if session.done == 0 and not session.rollbacks:
        keep_state(session, path)
    while True:
        try:
            _run_to_the_end(session, path, stop, watchers)
        except Diverged as error:
            if go_back(session, path, error):
                continue
            session.watch.pause()
            return {**session.record(completed=False), "failure": failure("diverged", error)}
        session.watch.pause()
        return session.record(completed=True)


def _run_to_the_end(
    session: Session, path: Path, stop: StopSignals | None, watchers: Sequence[Watcher]
) -> None:
    config = session.config
    every = config.train.eval_every or len(session.feed)
    saved_at = time.monotonic()
    while session.done < session.total:
        session.step()
        if session.done % CHECK_EVERY == 0:
            session.check_losses()
        for watcher in watchers:
            watcher.stepped(session)
        last = session.done == session.total
        if last or session.done % every == 0:
            point = session.add_point()
            for watcher in watchers:
                watcher.point(session, point)
            if not last:
                keep_state(session, path)
        due = time.monotonic() - saved_at >= 60 * config.output.checkpoint_minutes
        # A signal, 0 for a checkpoint, or -1 for neither; all ranks take the largest.
        signum = None if stop is None else stop.received
        now = session.ranks.largest(signum or (0 if due else -1))
        if not last and now >= 0:
            with session.watch.paused():
                state = session.state()
                if session.ranks.first:
                    _checkpoint(path, config, state, last=now > 0)
            saved_at = time.monotonic()
            if now > 0:
                raise Interrupted(now, path)


def _checkpoint(path: Path, config: Config, state: dict[str, Any], *, last: bool) -> None:
    """Save a checkpoint. Unless it is the `last`, a full disk does not end the training."""
    try:
        checkpoints.save(path, config, state)
    except OSError as error:
        if last:
            raise
        kept = "the one before is kept; " if path.exists() else ""
        typer.echo(f"{error}; {kept}training goes on", err=True)


def failure(kind: str, error: BaseException) -> dict[str, str]:
    """Why a run failed: `diverged` is the run's own outcome, `error` may go away when retried."""
    name, text = type(error).__name__, str(error)
    # A user's code may raise anything: KeyError says no more than its key.
    in_words = kind == "diverged" or isinstance(error, ConfigError | DataError | RuntimeError)
    told = text if text and in_words else f"{name}: {text}".removesuffix(": ")
    return {"kind": kind, "message": told}


def failed_record(config: Config, error: BaseException) -> Record:
    """The record of a run that could not be carried out."""
    return {
        **describe(config),
        "versions": versions(torch.device("cpu")),
        "curve": [],
        "final": {"train_loss": None, "test_loss": None, "test_error": None},
        "seconds": dict.fromkeys(("total", *PARTS, "evaluation")),
        "steps": 0,
        "memory": dict.fromkeys(("peak_bytes", "state_bytes", "parameters")),
        "completed": False,
        "failure": failure("error", error),
    }
