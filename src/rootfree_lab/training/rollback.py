"""After divergence, a run goes back to its last good state, with half the step and other batches.

States are kept when a run is evaluated, as files beside the checkpoint. A state is good once the
losses at or after it have been judged and found normal (see `divergence`). For N rollbacks, the
last N good states are kept, and one that has not been judged yet. What a rollback changes is part
of the checkpoint and of the record, so a killed run continues as if it had not been killed.
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
    """Keep the state of this step beside the checkpoint, and drop the oldest one.

    Nothing is kept before the last state has been judged, or if this state cannot be good.
    """
    allowed, before = session.config.train.rollback, session.kept
    if not allowed or (before and before[-1] > session.losses.judged):
        return
    if not all(bool(p.isfinite().all()) for p in session.model.parameters()):
        return  # the last step diverged; its loss is that of the parameters before it
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
    """Go back to the last good state; False, with nothing changed, if no rollback is left.

    A run goes one state further back if it diverges again before another state is good, or if a
    state cannot be read.
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
        # Lost time counts as time spent.
        session.restore({**saved, "seconds": session.watch.totals})
        session.rollbacks, session.kept = [*taken, entry], left
        session.draw_anew(len(session.rollbacks))
        # Saved before the states that it came from are removed: a killed run finds one of the two.
        checkpoints.save(path, session.config, session.state())
        _remove(path, [step for step in kept if step not in left])
    typer.echo(
        f"{session.config.title}: {error}; back to step {left[-1]}, learning rate × {factor:g}",
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
