"""How a command ends: a sentence for the reader, and an exit code."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from rootfree_lab.processes.stopping import Interrupted

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def ends(command: Callable[..., int | None]) -> Callable[..., None]:
    """A command that ends with its result as the exit code, None being zero.

    Errors of settings, data, files and signals end it with a sentence and a code of their own.
    """

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        raise typer.Exit(_code(lambda: command(*arguments, **options)))

    return run


def _code(work: Callable[[], int | None]) -> int:
    try:
        return work() or 0
    except Interrupted as stopped:
        left = f"; continue from {stopped.checkpoint} with --resume" if stopped.checkpoint else ""
        typer.echo(f"stopped{left}", err=True)
        return stopped.exit_code
    except KeyboardInterrupt:
        typer.echo("stopped at once", err=True)
        return INTERRUPTED
    # Bad settings, data or checkpoints; a file that may not be read, a full disk.
    except (ValueError, ModuleNotFoundError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        return USAGE
