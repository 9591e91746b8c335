"""What holds for every test of the benchmark."""

from __future__ import annotations

import pytest

from rootfree_lab.bench import ceilings


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch) -> None:
    """Measured as ever, on small operands: no test says how fast a processor is."""
    monkeypatch.setitem(ceilings._PRODUCT, "cpu", 64)
    monkeypatch.setitem(ceilings._BUFFER, "cpu", 1 << 20)
