"""What a person sees of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rootfree_lab.session import Point, Session

_REFRESH = 0.5  # seconds: each look at the loss waits for the device


class Watcher:
    """Told how a run goes; does nothing by itself."""

    def begin(self, session: Session) -> None:
        """A run begins, or goes on from a checkpoint."""

    def stepped(self, session: Session) -> None:
        """A step was made."""

    def point(self, session: Session, point: Point) -> None:
        """The run was evaluated."""

    def end(self) -> None:
        """The run is over, whatever the reason."""


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
    error = point["test_error"]
    if error is not None:
        parts.append(f"accuracy {100 * (1 - error):.2f} %")
    return " · ".join(parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def plain_lines(console: Console) -> Callable[[str], None]:
    """Print a line as it is."""
    return partial(console.print, soft_wrap=True, highlight=False, markup=False)


class Lines(Watcher):
    """One line a point, for files and pipes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def begin(self, session: Session) -> None:
        self._speed = Speed(session)
        self._name = f"{session.config.label} seed {session.config.train.seed}"
        if session.done:
            self._say(f"{self._name} · goes on from step {session.done}")

    def point(self, session: Session, point: Point) -> None:
        speed, left = self._speed.of(session)
        self._say(
            f"{self._name} · step {session.done}/{session.total} · epoch {point['epoch']:.2f} · "
            f"{describe_point(point)} · {speed:,.0f} {unit(session.kind)}/s · {clock(left)} left"
        )


class Bar(Watcher):
    """A progress bar; `renderable` is drawn by whoever holds the terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
        )
        self._looked = 0.0

    @property
    def renderable(self) -> RenderableType:
        """The bar itself."""
        return self._progress.get_renderable()

    def begin(self, session: Session) -> None:
        config = session.config
        self._speed = Speed(session)
        self._test = ""
        self._task = self._progress.add_task(
            f"{config.label} seed {config.train.seed}",
            total=session.total,
            completed=session.done,
            figures="",
        )

    def stepped(self, session: Session) -> None:
        if time.perf_counter() - self._looked < _REFRESH:
            return
        speed, _ = self._speed.of(session)
        accuracy = session.train_accuracy()
        figures = [f"loss {session.train_loss():.4f}"] if session.running.steps else []
        figures += [] if accuracy is None else [f"accuracy {100 * accuracy:.1f} %"]
        figures += [f"{speed:,.0f} {unit(session.kind)}/s", self._test]
        self._progress.update(
            self._task, completed=session.done, figures=" · ".join(filter(None, figures))
        )
        self._looked = time.perf_counter()

    def point(self, session: Session, point: Point) -> None:
        error = point["test_error"]
        if error is not None:
            self._test = f"test accuracy {100 * (1 - error):.2f} %"
        else:
            self._test = f"test loss {_number(point['test_loss'])}"
        self._progress.update(self._task, completed=session.done)

    def end(self) -> None:
        for task in self._progress.task_ids:
            self._progress.remove_task(task)


class LiveBar(Bar):
    """A bar that holds the terminal itself."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._live = Live(
            console=console, get_renderable=lambda: self.renderable, refresh_per_second=4
        )

    def __enter__(self) -> LiveBar:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()
