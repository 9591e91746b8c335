"""A part of the grid of docs/distributed.md: its steps are those of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed import grid
from distributed.grid import KINDS, METHODS, MODES, TOLD
from distributed.program import FIRST, SECOND, THIRD, ranks  # noqa: F401  (a fixture)
from rootfree_lab.bench.distributed_model import if_shampoo

pytestmark = pytest.mark.slow

TABLE = Path(__file__).parents[2] / "docs" / "distributed" / "grid.md"
TURNS = {4: FIRST, 2: SECOND, 1: THIRD}


@pytest.mark.parametrize("case", TOLD, ids=lambda case: " ".join(map(str, case)))
def test_the_steps_of_one_process(ranks, case):  # noqa: F811
    found = grid.deviation(case, [rank["grid"][case] for rank in ranks[TURNS[case.world]]])
    start = grid.weights(grid.model_of("fp64"))
    end = grid.alone(case.method, "fp64", case.steps)
    assert min(grid.by_kind(start, end).values()) > 0.02  # it went somewhere
    # In float32 as far as one process is from its own steps in float64.
    limit = 1e-10 if case.dtype == "fp64" else 4 * grid.round_off(case.method, case.steps)
    assert max(found.largest.values()) < limit
    assert found.bytes_right


def test_the_model_of_the_laboratory_counts_what_happens(ranks):  # noqa: F811
    shapes = [tuple(p.shape) for p in grid.model_of("fp64").parameters()]
    for world in (2, 4):
        case = grid.Case(world, "IFShampoo", "fsdp2", "fp64")
        runs = [rank["grid"][case] for rank in ranks[TURNS[world]]]
        told = if_shampoo(shapes, 0, world, block_size=8, product_bytes=8, state_bytes=8)
        assert told.sent == sum(run.sent for run in runs) / world > 0
        assert told.state == max(run.state for run in runs)


def test_the_table_has_the_whole_grid():
    """Written by grid.py; all of it is within the limits."""
    text = TABLE.read_text("utf-8")
    runs = len(grid.everything())
    assert f"{runs} runs of 50 steps; bytes as predicted in {runs} of them" in text
    names = [*METHODS, *(f"*{kind}*" for kind in KINDS)]
    for half, limit in zip(text.split("| fp32 |"), (1e-10, 1e-4), strict=True):
        for name in names:
            (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", half, re.MULTILINE)
            cells = [float(cell) for cell in row.split("|")]
            assert len(cells) == len(MODES)
            assert max(cells) < limit
