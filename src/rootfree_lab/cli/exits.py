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
        try:
            code = command(*arguments, **options) or 0
        except Interrupted as stopped:
            left = stopped.checkpoint
            how = f"continue from {left} with --resume" if left else "the same command continues"
            typer.echo(f"stopped; {how}", err=True)
            code = stopped.exit_code
        except KeyboardInterrupt:
            typer.echo("stopped at once", err=True)
            code = INTERRUPTED
        # Bad settings, data or checkpoints; a file that may not be read, a full disk.
        except (ValueError, ModuleNotFoundError, OSError) as error:
            typer.echo(f"Error: {error}", err=True)
            code = USAGE
        raise typer.Exit(code)

    return run
