"""The command `rootfree`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say how to get what it needs."""
    try:
        from rootfree_lab.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"The command line needs {error.name}: pip install 'rootfree[lab]'")
    app()
