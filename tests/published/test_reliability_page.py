"""The page on reliability: the tests it names exist, and there are as many as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", PAGE)


def test_named_tests_exist():
    assert len(NAMED) > 30
    for path, function in NAMED:
        assert (ROOT / path).exists(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")


def test_every_table_of_promises_names_a_test_in_each_row():
    tables = re.findall(r"\| promise \|.*?\n\n", PAGE, flags=re.DOTALL)
    rows = [row for table in tables for row in table.strip().splitlines()[2:]]
    assert len(rows) > 30
    assert [row for row in rows if "`tests/" not in row] == []


@pytest.mark.slow
def test_counts_are_true():
    _, _, end = PAGE.partition("## How many cases")
    claimed: dict[str, int] = {}
    for row in re.findall(r"^\| (`tests/.*) \| ([\d, ]+) \|$", end, flags=re.MULTILINE):
        paths, counts = re.findall(r"`([^`]+)`", row[0]), re.findall(r"\d+", row[1])
        claimed.update(zip(paths, map(int, counts), strict=True))
    assert claimed
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts="]
    listed = subprocess.run(
        [*command, *claimed], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = Counter(line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line)
    assert dict(found) == claimed
