"""Costs of many ranks: counted by hand in small, the table of the page, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rootfree_lab.bench import distributed_model
from rootfree_lab.bench.distributed_model import (
    MARKS,
    MODELS,
    Cost,
    Speeds,
    adamw,
    cells,
    distributed_shampoo,
    if_shampoo,
    lines,
    muon,
)
from rootfree_lab.cli.app import app

PAGE = Path(__file__).parents[3] / "docs" / "distributed.md"


def test_models_have_the_size_of_their_names():
    for name, model in MODELS.items():
        elements = sum(m * n for m, n in model.hidden) + model.rest
        assert elements == pytest.approx(float(name[:-1]) * 1e9, rel=0.04)


def test_costs_counted_by_hand():
    # Three matrices 4×8 on two ranks: Muon needs two turns, the second half empty.
    hidden = 3 * [(4, 8)]
    assert adamw(hidden, 4, 2) == Cost(0.0, 12 * 100 / 2, 1.0, 8 * 100 / 2)
    work = 5 * (4 * 4 * 4 * 8 + 2 * 64)
    assert muon(hidden, 0, 2) == Cost(2 * 2 * 2 * 32 / 2, 2 * work, 4 / 3, 4 * 96 / 2)
    # Every rank has two rows of each, with factors 2×2 and 8×8, and their roots.
    found = distributed_shampoo(hidden, 0, 2)
    assert found.state == 3 * 8 * (4 + 64 + 16)
    assert found.flops == pytest.approx(3 * (4 * 16 * 10 + 0.1 * (8 + 512)))
    # Owners hold half of their block: the other half comes, and its direction goes back.
    found = if_shampoo(2 * [(4, 8)], 0, 2)
    assert found.sent == 2 * 2 * 16
    assert found.state == 4 * (16 + 64) + 4 * 32
    assert found.imbalance == 1.0


def test_time_is_that_of_the_slowest_link():
    cost, speeds = Cost(80e9, 400e12, 1.0, 0.0), Speeds(node=400e9, link=40e9, matmul=400e12)
    assert cost.seconds(8, speeds) == pytest.approx(1.2)
    assert cost.seconds(16, speeds) == pytest.approx(3.0)


def test_the_table_of_the_page():
    text = PAGE.read_text("utf-8")
    block = text[text.index(MARKS.begin) : text.index(MARKS.end)]
    said = [re.split(r" \| ", row.strip("| ")) for row in block.splitlines() if " on " in row]
    assert len(said) == 36
    for line in lines(["1.1B", "70B"], [8]):
        assert cells(line, Speeds()) in said


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed_model, "lines", lambda: lines(["1.1B"], [8]))
    page, found = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text(f"{MARKS.begin}\n{MARKS.end}\n")
    files = ["--page", str(page), "--json", str(found)]
    arguments = ["bench", "--distributed-model", "--link", "10", *files]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert page.read_text().count("| 1.1B on 8 |") == 4
    assert [row["optimizer"] for row in json.loads(found.read_text())][-1] == "IFShampoo"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--distributed-model", "--first-try"], "--distributed-model has no place beside --first"),
        (["--distributed-model", "--turns", "3"], "--turns has no place beside --distributed-mod"),
        (["--distributed-model", "--seeds", "4"], "--seeds needs --first-try"),
        (["--node-link", "3"], "--node-link needs --distributed-model"),
        (["--distributed-model", "--link", "0"], "--link must be a positive number, got 0.0"),
        (["--distributed-model", "--page", "no.md"], "--page: there is no file 'no.md'"),
    ],
)
def test_what_is_refused(arguments, message):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
