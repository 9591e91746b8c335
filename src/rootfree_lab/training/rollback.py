"""After divergence: back to the last good state, with half the step and other batches.

States are kept when a run is evaluated, as files beside the checkpoint. One is good when a look at
the losses that came after it, or with it, has found nothing (`divergence`). For N rollbacks the
last N good states are kept, and one of which it is not known yet. What a rollback changes is part
of the checkpoint and of the record, so a run that is killed goes on as if it had not been.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from rootfree_lab.files import checkpoints
from rootfree_lab.training.divergence import Diverged
from rootfree_lab.training.session import Session

# What a rollback multiplies the learning rate by, for the rest of the run.
FACTOR = 0.5


def keep_state(session: Session, path: Path) -> None:
    """Keep the state of this step beside the checkpoint; the oldest one goes.

    Nothing is kept while it is not known whether the last one is good, nor where it cannot be.
    """
    allowed, before = session.config.train.rollback, session.kept
    if not allowed or (before and before[-1] > session.losses.judged):
        return
    if not all(bool(p.isfinite().all()) for p in session.model.parameters()):
        return  # lost in the last step: its loss was that of the parameters before
    session.kept = [*before[-allowed:], session.done]
    with session.watch.paused():
        try:
            file = checkpoints.kept_path(path, session.done)
            checkpoints.save(file, session.config, session.state())
        except OSError as error:
            session.kept = before
            typer.echo(f"{error}; the run cannot go back to this step", err=True)
            return
        _remove(path, before[:-allowed])


def go_back(session: Session, path: Path, error: Diverged) -> bool:
    """Go to the last good state; False where no rollback is left, and nothing has changed.

    A run that diverges again before another state was good goes one state further back. So does
    one whose state cannot be read.
    """
    taken, kept = session.rollbacks, session.kept
    good = [step for step in kept if step <= session.losses.judged]
    if len(taken) >= session.config.train.rollback or not good:
        return False
    again = bool(taken) and taken[-1]["to"] == good[-1]
    left = good[:-1] if again and len(good) > 1 else good
    factor = FACTOR ** (len(taken) + 1)
    with session.watch.paused():
        saved, left = _last_readable(session, path, left)
        if saved is None:
            return False
        entry = {"step": session.done, "to": left[-1], "factor": factor, "reason": str(error)}
        # Time that was lost is time that was spent.
        session.restore({**saved, "seconds": session.watch.totals})
        session.rollbacks, session.kept = [*taken, entry], left
        session.draw_anew(len(session.rollbacks))
        # Before what it was made from goes: a run that is killed here finds one or the other.
        checkpoints.save(path, session.config, session.state())
        _remove(path, [step for step in kept if step not in left])
    typer.echo(
        f"{session.config.label} seed {session.config.train.seed}: {error}; back to step "
        f"{left[-1]}, learning rate × {factor:g}",
        err=True,
    )
    return True


def _last_readable(
    session: Session, path: Path, steps: list[int]
) -> tuple[dict[str, Any] | None, list[int]]:
    """The last state of these steps that can be read, and the steps up to it."""
    for count in range(len(steps), 0, -1):
        try:
            saved = checkpoints.load(checkpoints.kept_path(path, steps[count - 1]), session.config)
        except checkpoints.CheckpointError as error:
            typer.echo(f"{error}; the run cannot go back to this step", err=True)
        else:
            return saved, steps[:count]
    return None, []


def _remove(path: Path, steps: list[int]) -> None:
    for step in steps:
        with suppress(OSError):  # it goes with the others at the run's end
            checkpoints.kept_path(path, step).unlink(missing_ok=True)
