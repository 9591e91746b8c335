"""What the ranks of all tests in this folder do: one start of each world serves them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributed import (
    agreement,
    checkpoints,
    grid,
    laboratory,
    one_rank,
    pages,
    recording,
    resuming,
    same_result,
    travelling,
)
from distributed.launch import results

#: checkpoints travel from world to world
WORLDS = (4, 2, 1, 4)
FIRST, SECOND, THIRD, LAST = range(4)


def run(turn: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if turn in (FIRST, SECOND):
        found |= same_result.run()
        found |= laboratory.run(folder)
        found |= travelling.run()
    if turn == FIRST:
        found |= recording.run()
    if turn != LAST:
        found |= grid.told()
    found |= checkpoints.run(turn, folder)
    if turn == SECOND:
        found["undisturbed"] = resuming.trained()
    if turn == THIRD:
        found |= one_rank.run()
    if turn == LAST:
        found |= pages.run(folder)
        found |= agreement.run(folder)
    return found


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What every rank of every world found."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base  # of all test processes
    return results("distributed.program", WORLDS, shared / "ranks")
