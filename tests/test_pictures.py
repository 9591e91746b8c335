"""The pictures of the documentation are those that their script draws, from the real structures."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from rootfree.structures import make_structure
from structures.patterns import PATTERNS, oracle

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
DRAW = runpy.run_path(str(FOLDER / "draw.py"))
PICTURES, STRUCTURES, D = DRAW["PICTURES"], DRAW["STRUCTURES"], DRAW["D"]


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_what_the_script_draws(name):
    committed = (FOLDER / name).read_text(encoding="utf-8")
    assert PICTURES[name]() == committed, "run python docs/pictures/draw.py"


def test_every_structure_is_drawn():
    assert [name.partition(":")[0] for name in STRUCTURES] == list(PATTERNS)


@pytest.mark.parametrize("name", STRUCTURES)
def test_matrices_have_the_entries_of_their_structure(name):
    pattern = oracle(name, D)
    filled = DRAW["factor"](make_structure(name, D)) != 0
    assert filled.equal(pattern.index < len(pattern.groups))


def test_the_squares_of_the_batches_are_the_terms_that_are_counted():
    drawn = DRAW["batch_size"]()
    paths = re.findall(rf'fill="{DRAW["FILLED"]}" stroke="[^"]*" d="([^"]*)"', drawn)
    counted = [int(n) for n in re.findall(r"B = (\d+)", drawn)]
    assert len(counted) == 3
    assert sum(path.count("z") for path in paths) == sum(counted)


def test_the_curves_have_the_scores_of_the_page():
    """The mean scores that the picture shows are those of the tables of docs/choosing.md."""
    page = (FOLDER.parent / "choosing.md").read_text(encoding="utf-8")
    shown = re.findall(r">([\d.]+%?) (\w+)</text>", PICTURES["tuned.svg"]())
    assert len(shown) == 9
    for score, name in shown:
        assert re.search(rf"^\| {name} \|.*\| {re.escape(score)} \|", page, re.MULTILINE)
