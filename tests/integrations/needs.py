"""Tests that need a library, skipped with a message where it is not there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Looked for, not imported: importing them all takes longer than collecting all tests."""
    missing = [name for name in libraries if find_spec(name) is None]
    reason = f"needs {', '.join(missing)}: pip install 'rootfree[integrations]'"
    return pytest.mark.skipif(bool(missing), reason=reason)
