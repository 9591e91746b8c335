"""Records: JSON there and back, and what is shown of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from lab.bench.records import iteration_record, step_record
from rootfree_lab.bench import chart
from rootfree_lab.bench.markdown import MARKS, as_markdown, fill, filled
from rootfree_lab.bench.record import RecordError, read, write
from rootfree_lab.bench.table import as_table, number, remarks, size

RECORDS = [step_record(), iteration_record()]


@pytest.mark.parametrize("record", RECORDS, ids=["steps", "iterations"])
def test_json_there_and_back(record, tmp_path):
    write(record, tmp_path / "a.json")
    assert read(tmp_path / "a.json") == record
    content = json.loads((tmp_path / "a.json").read_text())
    assert {"format", "environment", "settings", "reference", "rows"} <= set(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "no record of rootfree bench: its format is None"),
        ('{"format": "something else"}', "its format is 'something else'"),
    ],
)
def test_what_is_no_record_is_refused(text, message, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("count"), r"a\.json\.count is missing"),
        (lambda c: c.update(count="many"), r"\.count must be an integer, got 'many'"),
        (lambda c: c.update(rows=3), r"\.rows must be a list, got 3"),
        (lambda c: c.update(settings=3), r"\.settings must be a table, got 3"),
        (lambda c: c.update(ceilings=3), r"\.ceilings must be a table, got 3"),
        (lambda c: c["rows"][1].update(extra=1), r"rows\[1\]\.extra. is unknown"),
        (lambda c: c["rows"][0].update(ratio=True), r"rows\[0\]\.ratio must be a number"),
    ],
)
def test_an_altered_record_is_refused(change, message, tmp_path):
    file = tmp_path / "a.json"
    write(step_record(), file)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=message):
        read(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RecordError, match=r"a\.json cannot be read"):
        read(tmp_path / "a.json")


def shown(record, width: int) -> str:
    console = Console(width=width, record=True, file=None)
    with console.capture() as capture:
        console.print(as_table(record, width))
    return capture.get()


def test_a_wide_table_has_everything():
    text = shown(step_record(), 220)
    row = next(line for line in text.splitlines() if "IFShampoo" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "IFShampoo T=2", "4.00", "3.90 to 4.20", "4.00", "6.00 / 2.00", "3.80", "12.2", "123 MB",
        "0.75 (18%)", "500 (62%)", "2.50", "1.60",
    ]  # fmt: skip
    assert "806" in text
    assert "2026-01-02" in text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("record", RECORDS, ids=["steps", "iterations"])
def test_a_narrow_table_leaves_out_columns_not_digits(record, width):
    text = shown(record, width)
    assert "…" not in text
    assert "ratio" in text
    assert "AdamW fused" in text


def test_remarks_tell_why():
    assert remarks(step_record()) == [
        "IFShampoo T=2: parameters were no longer finite",
        "SOAP T=10: not measured, out of memory",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.01234, "0.0123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (1234.5, "1234"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_sizes():
    assert [size(b) for b in (None, 12, 1200, 3_400_000, 5_600_000_000)] == [
        "-", "12 B", "1.20 kB", "3.40 MB", "5.60 GB",
    ]  # fmt: skip


def test_markdown_of_several_sets():
    text = as_markdown([step_record(), step_record("gpt1b"), iteration_record()])
    head, rule, first = text.splitlines()[:3]
    assert head == "| ms a step (state bytes a parameter) | vit_b | gpt1b |"
    assert rule == "|---|---:|---:|"
    assert first == "| torch AdamW fused | 1.00 (8.0) | 1.00 (8.0) |"
    assert "| SOAP T=10 | - | - |" in text
    assert "**gpt1b: 86.4 M float32 parameters" in text
    assert "| IFShampoo T=2 | 105 | 104 to 106 | 1.050 |" in text
    assert "- torch Muon: not measured, out of memory" in text
    # every table is apart from the text around it
    assert all(b == "" for a, b in pairwise(text.splitlines())
               if a.startswith("|") and not b.startswith("|"))  # fmt: skip


def test_columns_that_differ_by_dtype_or_device_say_so():
    half = step_record(dtype="bfloat16")
    assert "| vit_b, float32 | vit_b, bfloat16 |" in as_markdown([step_record(), half])
    other = replace(step_record("gpt1b"), environment=replace(half.environment, device="Another"))
    assert "| vit_b, A Device | gpt1b, Another |" in as_markdown([step_record(), other])


def test_a_page_is_filled_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS.begin}\nold\n{MARKS.end}\nafter\n")
    text = as_markdown([step_record()])
    fill(page, text, MARKS)
    written = page.read_text()
    assert written.startswith(f"before\n{MARKS.begin}\n")
    assert written.endswith(f"{MARKS.end}\nafter\n")
    assert "old" not in written
    assert filled(page, text, MARKS) == written
    assert "No measurement" in filled(page, as_markdown([]), MARKS)
    page.write_text("no marks")
    with pytest.raises(RecordError, match="must have one block"):
        fill(page, text, MARKS)
    assert page.read_text() == "no marks"


def test_the_page_of_the_documentation_shows_the_committed_files():
    """If this fails: rootfree bench-table docs/performance/*.json --page docs/performance.md"""
    docs = Path(__file__).parents[3] / "docs"
    records = [read(file) for file in sorted((docs / "performance").glob("*.json"))]
    page = docs / "performance.md"
    assert page.read_text(encoding="utf-8") == filled(page, as_markdown(records), MARKS)


@pytest.mark.parametrize("ending", chart.ENDINGS)
@pytest.mark.parametrize("record", RECORDS, ids=["steps", "iterations"])
def test_charts(record, ending, tmp_path):
    chart.draw(record, tmp_path / f"chart{ending}")
    assert (tmp_path / f"chart{ending}").stat().st_size > 1000


def test_a_chart_of_failures_alone(tmp_path):
    record = step_record(rows=[row for row in step_record().rows if row.failure])
    chart.draw(record, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").exists()
