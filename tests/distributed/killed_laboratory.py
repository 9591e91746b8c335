"""`rootfree train` whose first rank is killed while it writes a checkpoint; see killing.py.

At the first start rank 0 dies in the middle of writing its second checkpoint.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
from typing import Any

import torch


def half_written(content: Any, file: Any, **options: Any) -> None:
    """torch.save, which dies with half of the second checkpoint on the disk."""
    if not str(getattr(file, "name", "")).endswith(".tmp"):
        save(content, file, **options)  # torch uses it for other things too
        return
    half_written.checkpoints += 1
    whole = io.BytesIO()
    save(content, whole, **options)
    if half_written.checkpoints == 2:
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    file.write(whole.getvalue())


save, half_written.checkpoints = torch.save, 0


def main(*arguments: str) -> None:
    """What a rank does at each start, with the arguments of `rootfree`."""
    torch.set_num_threads(1)
    sys.argv[1:] = arguments
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        torch.save = half_written
    runpy.run_module("rootfree_lab", run_name="__main__")
