"""Is the process alive that has a trial? On its own machine a death is known at once."""

from __future__ import annotations

import os
import platform
import uuid
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def _machine() -> str:
    """Equal for two processes exactly if they see each other's process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return f"{platform.node()}/{uuid.getnode():x}"


def _began(pid: int) -> str | None:
    """When a process began, where the system says so: numbers of processes are used again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def token() -> str:
    """This process, for others to ask after."""
    return f"{_machine()}|{os.getpid()}|{_began(os.getpid()) or ''}"


def is_alive(token: str) -> bool | None:
    """Whether the process of a token lives; None where this machine cannot know."""
    machine, _, rest = token.partition("|")
    number, _, began = rest.partition("|")
    if machine != _machine() or not number.isdecimal():
        return None
    if began:
        return _began(int(number)) == began
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's process
        return True
    return True
