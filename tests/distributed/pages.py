"""The scripts of docs/distributed.md; see test_pages.py."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def scripts(page: Path = PAGE) -> dict[str, str]:
    """By the heading that each stands under."""
    found, heading = {}, ""
    for part in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading = part.splitlines()[0]
        for source in re.findall(r"^```py\n(.*?)^```$", part, re.MULTILINE | re.DOTALL):
            found[heading] = source
    return found


def run(folder: Path) -> dict[str, Any]:
    """The losses before and after, of a fixed batch that all ranks see."""
    here = Path.cwd()
    os.chdir(folder)
    found = {}
    for heading, source in scripts().items():
        namespace: dict[str, Any] = {"__name__": "__main__"}
        with patch.object(dist, "init_process_group", lambda: None):  # it is there already
            exec(compile(source, heading, "exec"), namespace)
        optimizer = namespace["optimizer"]
        steps = {int(row["step"]) for row in optimizer.state.values()}
        finite = all(
            torch.as_tensor(p.to_local() if hasattr(p, "to_local") else p).isfinite().all()
            for p in namespace["model"].parameters()
        )
        found[heading] = steps, bool(finite)
    os.chdir(here)
    return {"pages": found}
