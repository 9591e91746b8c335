"""Records as Markdown, and the page of the documentation that shows them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rootfree_lab.bench.record import Record, RecordError, StepRecord, StepRow
from rootfree_lab.bench.table import NOTHING, caption, cells, headings, number, remarks, title


@dataclass(frozen=True)
class Marks:
    """Two comments of a page; what is between them is written by a command."""

    name: str

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.name}: end -->"


MARKS = Marks("bench")

EMPTY = "No measurement is committed yet."


def as_markdown(records: Sequence[Record]) -> str:
    """A table of all sets side by side where there are several, then one for each record."""
    if not records:
        return EMPTY + "\n"
    steps = [r for r in records if isinstance(r, StepRecord)]
    parts = [_side_by_side(steps)] if len(steps) > 1 else []
    return "\n".join([*parts, *map(_one, records)])


def fill(page: Path, content: str, marks: Marks) -> None:
    """Put the content between the marks of a page."""
    page.write_text(filled(page, content, marks), encoding="utf-8")


def filled(page: Path, content: str, marks: Marks) -> str:
    """The page's text, with the content between its marks."""
    if not page.is_file():
        raise RecordError(f"--page: there is no file {str(page)!r}")
    text = page.read_text(encoding="utf-8")
    block = re.compile(f"{re.escape(marks.begin)}.*?{re.escape(marks.end)}", re.DOTALL)
    if len(block.findall(text)) != 1:
        raise RecordError(f"{page} must have one block between {marks.begin!r} and {marks.end!r}")
    return block.sub(lambda _: f"{marks.begin}\n\n{content}\n{marks.end}", text)


def _one(record: Record) -> str:
    lines = [
        f"**{title(record)}**",
        "",
        *rows(headings(record), cells(record)),
        "",
        caption(record),
    ]
    lines += ["", *[f"- {remark}" for remark in remarks(record)]] if remarks(record) else []
    return "\n".join(lines) + "\n"


def _side_by_side(records: Sequence[StepRecord]) -> str:
    """Milliseconds a step and, in brackets, state bytes a parameter."""
    columns = [{row.name: row for row in record.rows} for record in records]
    names = dict.fromkeys(name for column in columns for name in column)

    def cell(found: StepRow | None) -> str:
        if found is None or found.ms is None or found.state_bytes_per_parameter is None:
            return NOTHING
        return f"{number(found.ms.median)} ({found.state_bytes_per_parameter:.1f})"

    body = [[name, *(cell(column.get(name)) for column in columns)] for name in names]
    head = ("ms a step (state bytes a parameter)", *[_column(r, records) for r in records])
    return "\n".join([*rows(head, body), ""])


def _column(record: StepRecord, records: Sequence[StepRecord]) -> str:
    """The set's name, with its dtype or device where only that tells it from another."""
    name = record.parameters
    same = [r for r in records if r.parameters == name]
    if len({r.dtype for r in same}) > 1:
        name += f", {record.dtype}"
    if len({r.environment.device for r in records}) > 1:
        name += f", {record.environment.device}"
    return name


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    rule = "|---|" + "---:|" * (len(head) - 1)
    return [line(head), rule, *map(line, body)]
