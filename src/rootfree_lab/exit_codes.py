"""How a command ends: a sentence for the reader, and an exit code."""

from __future__ import annotations

from collections.abc import Callable

import typer

from rootfree_lab.stopping import Interrupted

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def with_exit_codes(work: Callable[[], int]) -> int:
    """Run a command; errors of settings, data, files and signals: a sentence and an exit code."""
    try:
        return work()
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
