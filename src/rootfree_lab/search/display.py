"""What a person sees of a search: a table that is kept up to date, or lines; and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rootfree_lab.search.attempts import Status, best
from rootfree_lab.search.ledger import Ledger
from rootfree_lab.search.outcomes import DIVERGED, PRUNED
from rootfree_lab.search.settings import Claim
from rootfree_lab.search.spaces import Plain
from rootfree_lab.training.watching.progress import describe_point, plain_lines


class Display:
    """Told of every trial of this process; shows the best so far of every optimizer.

    On a terminal, inside the context `live`, in a table that is kept up to date.
    """

    def __init__(self, console: Console, ledger: Ledger) -> None:
        self._console, self._ledger = console, ledger
        self._running: dict[int, str] = {}
        self._summary = summary(ledger)
        self.live = Live(
            get_renderable=lambda: Group(self._summary, *map(Text, self._running.values())),
            console=console, refresh_per_second=2, auto_refresh=console.is_terminal,
            transient=True,  # the last table follows
        )  # fmt: skip

    def __call__(self, claim: Claim, kind: str, content: Any) -> None:
        name = claim.slot.name
        if kind == "began":
            self._running[claim.id] = f"{name} · begins"
        elif kind == "point":
            figures = describe_point(content.point)
            self._running[claim.id] = f"{name} · {content.step}/{content.total} · {figures}"
        else:
            self._running.pop(claim.id, None)
        if kind in ("ended", "failed"):
            text = content if kind == "failed" else outcome(content)
            plain_lines(self._console)(f"{name} · {text} · {self._best(claim.slot.label)}")
        if kind != "point" and self._console.is_terminal:
            self._summary = summary(self._ledger)

    def _best(self, label: str) -> str:
        statuses = self._ledger.statuses(label)
        ended, found = sum(s.ended for s in statuses), best(statuses)
        value = "none yet" if found is None else f"{found.value:.4g} ({settings(found)})"
        return f"{ended}/{len(statuses)} trials, best {value}"


def outcome(record: dict[str, Any]) -> str:
    """How a trial ended, in words."""
    if record["completed"]:
        return describe_point(record["curve"][-1])
    failure = record["failure"]
    return f"{failure['kind']}: {failure['message']}"


def settings(status: Status) -> str:
    """The settings of a trial on a line."""
    assert status.result is not None
    return ", ".join(f"{name} {_short(v)}" for name, v in status.result.settings.items())


def _short(value: Plain) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(ledger: Ledger) -> RenderableType:
    """One row an optimizer: how far it is; below, its best settings."""
    made = Table(title="best so far")
    made.add_column("optimizer", overflow="fold")
    for heading in ("wide", "narrowed", "pruned", "diverged", "failed", "best"):
        made.add_column(heading, justify="right")
    lines: list[RenderableType] = []
    for label in ledger.entries:
        statuses = ledger.statuses(label)
        found = best(statuses)
        made.add_row(
            escape(label),
            *(_ended([s for s in statuses if s.slot.stage == stage]) for stage in (1, 2)),
            *(str(_count(statuses, kind)) for kind in (PRUNED, DIVERGED)),
            str(sum(s.failure is not None for s in statuses)),
            "-" if found is None else f"{found.value:.4g}",
        )
        if found is not None:
            lines.append(Text(f"{label}: {settings(found)}"))
    return Group(made, *lines)


def _ended(statuses: Sequence[Status]) -> str:
    return f"{sum(s.ended for s in statuses)}/{len(statuses)}"


def _count(statuses: Sequence[Status], kind: str) -> int:
    return sum(s.result is not None and s.result.outcome == kind for s in statuses)
