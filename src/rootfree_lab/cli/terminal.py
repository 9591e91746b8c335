"""Where commands print, and the wait for torch, which takes seconds to load: said at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

console = Console()


@contextmanager
def loading_torch() -> Iterator[None]:
    """Import inside what loads torch: a spinner on a terminal, elsewhere a line, on stderr.

    Nothing is shown where torch is loaded already, and of several ranks only the first speaks.
    """
    errors = Console(stderr=True)
    if "torch" in sys.modules or os.environ.get("RANK", "0") != "0":
        yield
    elif errors.is_terminal:
        with errors.status("loading torch"):
            yield
    else:
        print("loading torch", file=sys.stderr, flush=True)
        yield
