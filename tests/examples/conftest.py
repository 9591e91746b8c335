"""Examples are scripts: what lies beside them can be imported."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from rootfree_lab.torchvision_shim import make_importable

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    with suppress(ModuleNotFoundError):  # timm and others import torchvision
        make_importable()
    monkeypatch.syspath_prepend(EXAMPLES)
