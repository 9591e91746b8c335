"""Ranks that die, and torchrun's agent, which starts all again; see test_kill.py.

Run as a script: killing.py FOLDER. The agent forks the ranks from this process, which has imported
everything.
"""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from distributed import killed_laboratory, resuming
from distributed.laboratory import saved
from distributed.launch import LATE
from rootfree_lab.files.toml_writing import toml

#: how often ranks die in each, and all start again
RESTARTS = {"resuming": 2, "laboratory": 1}


def started(restarts: int, run: Callable[..., Any], *arguments: str) -> None:
    """As `torchrun --standalone --nproc-per-node=2` does, on forks."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="fork",
    )
    elastic_launch(config, run)(*arguments)


def main(folder: Path) -> None:
    for late in LATE:
        importlib.import_module(late)
    for name in RESTARTS:
        (folder / name).mkdir()
    started(RESTARTS["resuming"], resuming.main, str(folder / "resuming"))
    there = folder / "laboratory"
    (there / "run.toml").write_text(toml(saved()))
    arguments = ["train", str(there / "run.toml"), "--resume", "--out", str(there)]
    started(RESTARTS["laboratory"], killed_laboratory.main, *arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
