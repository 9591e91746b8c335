"""The progress of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rootfree_lab.training.session import Point, Session

# Seconds between two readings of the loss, each of which waits for the device: terminal, log.
A_MOMENT, A_MINUTE = 0.5, 60.0


class Watcher:
    """Gets the events of a run; does nothing by itself."""

    def begin(self, session: Session) -> None:
        """A run begins, or goes on from a checkpoint."""

    def stepped(self, session: Session) -> None:
        """A step was made."""

    def point(self, session: Session, point: Point) -> None:
        """The run was evaluated."""

    def end(self) -> None:
        """The run has ended, for whatever reason."""


class Speed:
    """Examples (tokens) a second and the time left, since the run or its continuation began."""

    def __init__(self, session: Session) -> None:
        self._began, self._from = time.perf_counter(), session.done

    def of(self, session: Session) -> tuple[float, float]:
        """Examples a second, seconds left."""
        elapsed = time.perf_counter() - self._began
        rate = (session.done - self._from) / max(elapsed, 1e-9)
        return rate * session.terms, (session.total - session.done) / max(rate, 1e-9)


def unit(kind: str) -> str:
    """What is counted in 'a second'."""
    return {"images": "images", "text": "tokens", "graph": "nodes"}.get(kind, "rows")


def describe_point(point: Point) -> str:
    """The figures of a point of the curve, in words."""
    parts = [f"loss {_number(point['train_loss'])}", f"test loss {_number(point['test_loss'])}"]
    if point["test_error"] is not None:
        parts.append(_test_figure(point))
    return " · ".join(parts)


def _test_figure(point: Point) -> str:
    """The accuracy, or the loss where there is none."""
    error = point["test_error"]
    if error is None:
        return f"loss {_number(point['test_loss'])}"
    return f"accuracy {100 * (1 - error):.2f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def plain_lines(console: Console) -> Callable[[str], None]:
    """Print a line as it is."""
    return partial(console.print, soft_wrap=True, highlight=False, markup=False)


class Lines(Watcher):
    """Lines for files and pipes: at the start, at the last point, and every minute in between."""

    def __init__(self, say: Callable[[str], None], every: float = A_MINUTE) -> None:
        self._say, self._every = say, every

    def begin(self, session: Session) -> None:
        self._speed = Speed(session)
        self._name = session.config.title
        self._said, self._test = time.monotonic(), ""
        where = f"goes on from step {session.done}" if session.done else "starts"
        self._say(f"{self._name} · {where} · {session.total} steps on {session.device}")

    def stepped(self, session: Session) -> None:
        if self._due() and session.done < session.total:
            self._line(session, f"loss {session.running.mean_loss():.4f}", self._test)

    def point(self, session: Session, point: Point) -> None:
        self._test = f"test {_test_figure(point)}"
        if self._due() or session.done == session.total:
            self._line(session, describe_point(point))

    def _due(self) -> bool:
        return time.monotonic() - self._said >= self._every

    def _line(self, session: Session, *figures: str) -> None:
        self._said = time.monotonic()
        speed, left = self._speed.of(session)
        step = f"step {session.done}/{session.total}"
        epoch = f"epoch {session.done / len(session.feed):.2f}"
        pace = (f"{speed:,.0f} {unit(session.kind)}/s", f"{timedelta(seconds=round(left))} left")
        self._say(" · ".join(filter(None, (self._name, step, epoch, *figures, *pace))))


class Bar(Watcher):
    """A progress bar; inside the context `progress` it holds the terminal itself."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._looked = 0.0

    def begin(self, session: Session) -> None:
        self._speed = Speed(session)
        self._test = ""
        self._task = self.progress.add_task(
            session.config.title, total=session.total, completed=session.done, figures=""
        )

    def stepped(self, session: Session) -> None:
        if time.perf_counter() - self._looked < A_MOMENT:
            return
        speed, _ = self._speed.of(session)
        accuracy = session.running.accuracy()
        figures = [f"loss {session.running.mean_loss():.4f}"] if session.running.steps else []
        figures += [] if accuracy is None else [f"accuracy {100 * accuracy:.1f} %"]
        figures += [f"{speed:,.0f} {unit(session.kind)}/s", self._test]
        self.progress.update(
            self._task, completed=session.done, figures=" · ".join(filter(None, figures))
        )
        self._looked = time.perf_counter()

    def point(self, session: Session, point: Point) -> None:
        self._test = f"test {_test_figure(point)}"
        self.progress.update(self._task, completed=session.done)

    def end(self) -> None:
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
